"""The model card of an exported folder: what the model is, how it was made and how to use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..delta.delta import Delta
from ..delta.meta import Meta, shown_score
from ..model.anatomy import PAIR
from ..model.base import Base
from ..tasks import Task
from ..terminal.progress import counted
from .pair_split import joint_length

GENERATED = "<!-- written by bitfit push, which replaces it; remove this line to keep the text -->"
PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


@dataclass(frozen=True)
class Exported:
    """How an exported model differs from the stock class of its base."""

    injected: tuple[str, ...] = ()  # biases for layers that have none in the base
    switches: tuple[str, ...] = ()  # settings of the configuration that add some of them
    outside: tuple[str, ...] = ()  # those that no setting adds
    adapters: tuple[str, ...] = ()  # tensors of adapters
    custom_code: bool = False  # whether the folder contains modeling code


def card(delta: Delta, base: Base, task: Task, exported: Exported) -> str:
    """The card as Markdown."""
    meta = delta.meta
    share = f"{meta.trained:,} of {meta.total:,} parameters ({meta.trained / meta.total:.3%})"
    labels = ", ".join(f"`{_plain(label)}`" for label in task.labels)
    what = task.card.format(texts="text pairs" if meta.pairs else "texts", labels=labels)
    return f"""# {_plain(meta.base)} fine-tuned by bitfit

{what}
Selection `{_plain(meta.select)}`, head `{meta.head}`: {share} were trained; everything else is as in the base.
{_score(delta)}{_lengths(meta, task)}
{_folded(delta)}{_differences(exported)}
## Use
{_pipeline(task, meta.pairs, exported)}
```python
{_usage(delta, base, task, exported)}```
"""


def peft_card(delta: Delta, base: Base, task: Task) -> str:
    """The card of a PEFT folder as Markdown."""
    meta = delta.meta
    share = f"{meta.trained:,} of {meta.total:,} parameters ({meta.trained / meta.total:.3%})"
    labels = ", ".join(f"`{_plain(label)}`" for label in task.labels)
    what = task.card.format(texts="text pairs" if meta.pairs else "texts", labels=labels)
    names = f", id2label={dict(enumerate(task.labels))!r}" if task.labels else ""  # repr is Python, JSON is not quite
    segments = ", return_token_type_ids=True" if base.segments else ""  # some tokenizers leave them out
    inputs = f'{task.card_input(meta.pairs)}, max_length={meta.max_length}{segments}, return_tensors="pt"'
    source = meta.hub_base or meta.base
    return f"""---
base_model: {json.dumps(source)}
library_name: peft
tags: ["bitfit"]
---
# {_plain(meta.base)} fine-tuned by bitfit, for PEFT

{what}
Selection `{_plain(meta.select)}`: {share} were trained.
{_score(delta)}
## Use

```python
import torch
from peft import PeftModel
from transformers import {task.transformers_class}, AutoTokenizer

base = {json.dumps(source)}
{_tokenizer_lines(base, task, "base")}
model = {task.transformers_class}.from_pretrained(base, num_labels={task.outputs}{names}, dtype=torch.float32)
model = PeftModel.from_pretrained(model, ".").eval()
batch = tokenizer({inputs})
with torch.no_grad():
    output = model(**batch)
logits = {task.card_logits}
```
"""


def hub_card(delta: Delta, repository: str) -> str:
    """The card of a delta on the hub as Markdown, from the delta's metadata."""
    meta = delta.meta
    task = Task.of_delta(delta)
    labels = ", ".join(f"`{_plain(label)}`" for label in task.labels)
    what = task.card.format(texts="text pairs" if meta.pairs else "texts", labels=labels)
    share = f"{meta.trained:,} of {meta.total:,} parameters ({meta.trained / meta.total:.3%})"
    injected = "" if meta.inject == "none" else f", injected `{_plain(meta.inject)}`"
    base_argument = "" if meta.hub_base else ', base="FOLDER"'
    sample = json.dumps(task.sample_input(meta.pairs) if meta.pairs else task.sample_input(False)[0])
    return f"""---
{_front_matter(delta, task, repository)}---
{GENERATED}
# {_plain(meta.name or meta.task)}: a delta of {_plain(meta.base)}

{what}
A delta holds the few numbers that differ from a frozen base. This one is for {_base_named(delta)}.

## What was trained

Selection `{_plain(meta.select)}`{injected}, head `{meta.head}`: {share}.
{_trial(delta)}
## Scores

{_score_table(delta)}
## Use

```python
import bitfit  # pip install bitfit

bitfit.predict("hf:{repository}", [{sample}]{base_argument})
```

or `bitfit predict hf:{repository} {_quoted(task.sample_input(meta.pairs))}{"" if meta.hub_base else " --base FOLDER"}`
"""


def _front_matter(delta: Delta, task: Task, repository: str) -> str:
    """The metadata that the hub reads, as YAML. A JSON string is also a YAML string."""
    meta = delta.meta
    lines = [] if meta.hub_base is None else [f"base_model: {json.dumps(meta.hub_base)}"]
    lines.append("library_name: bitfit")
    pipeline = PIPELINES.get(task.transformers_class)
    if pipeline:
        lines.append(f"pipeline_tag: {pipeline}")
    lines.append(f"tags: {json.dumps(['bitfit', meta.task])}")
    scores = meta.metrics.get("dev", {})
    if scores:
        lines.append(f"metrics: {json.dumps([meta.metric])}")
        results = [{"type": metric, "value": round(score.value, 6)} for metric, score in scores.items()]
        name = meta.name or "own data"
        result = {
            "task": {"type": pipeline or meta.task},
            "dataset": {"name": name, "type": re.sub(r"[^A-Za-z0-9_-]", "-", name), "split": "dev"},
            "metrics": results,
        }
        lines.append(f"model-index: {json.dumps([{'name': repository.partition('/')[2], 'results': [result]}])}")
    return "".join(f"{line}\n" for line in lines)


def _base_named(delta: Delta) -> str:
    meta = delta.meta
    if meta.hub_base is not None:
        return f"[{meta.hub_base}](https://huggingface.co/{meta.hub_base})"
    folder = f"the model folder `{_plain(meta.base)}` (fingerprint {meta.fingerprint[:12]})"
    return f"{folder}, which is not part of this repository"


def _trial(delta: Delta) -> str:
    trial = delta.meta.trial
    if trial is None:
        return ""
    rows = f"{counted(trial.train_rows, 'row')}, " if trial.train_rows else ""
    epochs = counted(trial.epochs, "epoch")
    return f"{rows}learning rate {trial.lr:g}, batch {trial.batch}, {epochs}, seed {trial.seed}.\n"


def _score_table(delta: Delta) -> str:
    """Every score with its interval as a table."""
    rows = []
    for split, scores in delta.meta.metrics.items():
        for metric, score in scores.items():
            value, low, high = (shown_score(metric, number) for number in (score.value, score.low, score.high))
            rows.append(f"| {_plain(split)} | {_plain(metric)} | {value} | {low} to {high} |\n")
    if not rows:
        return "The delta was not scored.\n"
    return "| data | metric | score | 95% interval |\n|---|---|---|---|\n" + "".join(rows)


def _quoted(texts: Sequence[str]) -> str:
    return " ".join(f'"{text}"' for text in texts)


def _score(delta: Delta) -> str:
    score = delta.meta.score
    if score is None:
        return ""
    interval = f"95% interval {100 * score.low:.1f} to {100 * score.high:.1f}"
    return f"Dev {delta.meta.metric} {100 * score.value:.1f} ({interval}).\n"


def _lengths(meta: Meta, task: Task) -> str:
    """How much of its inputs the model reads."""
    if task.by_token:
        return f"Longer inputs are read in windows of {meta.max_length} tokens that share {meta.stride}."
    if meta.pool != PAIR:
        return f"Texts are cut at {meta.max_length} tokens."
    return f"""Each text of a pair is encoded by itself, cut at {meta.max_length} tokens.
The tokenizer joins the two as usual, and the model takes them apart at the first separator token, which a first text
must not contain. A single text is read as a pair with an empty second text.
`truncation=True` cuts a joint pair at {joint_length(meta.max_length)} tokens, the longer text first: all that the model
reads remains. Do not pass a smaller `max_length`."""


def _pipeline(task: Task, pairs: bool, exported: Exported) -> str:
    if task.pipeline is None:
        return ""
    trust = ", trust_remote_code=True" if exported.custom_code else ""
    cut = "" if task.by_token else ", truncation=True"
    inputs = 'pairs, each as `{"text": ..., "text_pair": ...}`' if pairs else "texts"
    return f'`pipeline("{task.pipeline}", folder{trust}{cut})` answers {inputs}. The same by hand:\n'


def _folded(delta: Delta) -> str:
    if not delta.meta.folded:
        return ""
    differ = sum(values.size for _, values in delta.entries.values())
    return f"Biases whose effect others can take over are folded into them; {differ:,} numbers of the encoder differ.\n"


def _differences(exported: Exported) -> str:
    """The section on how a model differs from the architecture of its base."""
    sentences = []
    if exported.custom_code:
        sentences.append(
            "No class of transformers computes this model, so the folder contains `modeling_bitfit.py`, which does. "
            "transformers runs it with `trust_remote_code=True` and does not load the folder without."
        )
    if exported.injected:
        sentences.append(f"Layers that have no bias in the base have one here: {_by_layer(exported.injected)}.")
    if exported.adapters:
        sentences.append(f"Some layers have a bottleneck on their outputs: {_by_layer(exported.adapters)}.")
    if exported.switches:
        settings = ", ".join(f"`{name}`" for name in exported.switches)
        sentences.append(f"config.json sets {settings} to true, so that the stock classes load them.")
    if not sentences:
        return ""
    return "\n## What differs from the base's architecture\n\n" + "\n".join(sentences) + "\n"


def _by_layer(names: Sequence[str]) -> str:
    layers = (re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"`{name}`" for name in dict.fromkeys(layers))


def _usage(delta: Delta, base: Base, task: Task, exported: Exported) -> str:
    name = task.transformers_class
    trust = ", trust_remote_code=True" if exported.custom_code else ""
    # The tokenizer of a pair knows how long it may be.
    cut = "" if delta.meta.pool == PAIR else f", max_length={delta.meta.max_length}"
    inputs = f'{task.card_input(delta.meta.pairs)}{cut}, return_tensors="pt"'
    return f"""import torch
from transformers import {name}, AutoTokenizer

folder = "."
{_tokenizer_lines(base, task, f"folder{trust}")}
model = {name}.from_pretrained(folder{trust}, dtype=torch.float32).eval()
batch = tokenizer({inputs})
with torch.no_grad():
    output = model(**batch)
logits = {task.card_logits}
"""


def _tokenizer_lines(base: Base, task: Task, arguments: str) -> str:
    """The lines that load the tokenizer. One of bytes is set to read words as bitfit does: each after a space."""
    places = _byte_level_places(base) if task.form == "words" else []
    if not places:
        return f"tokenizer = AutoTokenizer.from_pretrained({arguments})"
    lines = [f"tokenizer = AutoTokenizer.from_pretrained({arguments}, add_prefix_space=True)"]
    for place in places:  # not every class of tokenizers heeds the argument
        lines.append(f"tokenizer.backend_tokenizer.pre_tokenizer{place}.add_prefix_space = True")
    return "\n".join(lines)


def _byte_level_places(base: Base) -> list[str]:
    """Where the tokenizer splits a text into bytes: "" if that is its only step, else an index such as "[1]"."""
    rules = json.loads(base.tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer") or {}
    if rules.get("type") == "ByteLevel":
        return [""]
    steps = enumerate(rules.get("pretokenizers", ()))
    return [f"[{number}]" for number, step in steps if step["type"] == "ByteLevel"]


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in " .,:*+&@%()-_/" else "?" for c in text)
