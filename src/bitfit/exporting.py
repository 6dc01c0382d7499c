"""Export: a delta merged into its base as a plain transformers folder with a model card."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .bank import lane_of_delta
from .base import Base
from .delta import HEAD, Delta, write_entries
from .errors import DeltaError, UsageError
from .model import Model
from .tasks import Task
from .tensorfile import check_target

HEAD_FILE = "head.safetensors"


def export(delta: Delta, base: Base, folder: str | Path) -> Path:
    """Write the merged model, its tokenizer and a card; all or nothing, and the base stays as it was."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: already exists and is not empty; name another folder with --out")
    task = Task.of_delta(delta)
    model = Model(base, task.outputs, delta.meta["pool"])
    lane_of_delta(model, delta)  # the same checks as for wearing it
    made = not target.exists()
    check_target(target / "README.md")
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _save(delta, base, model, task, temporary)
        _tokenizer(base).save_pretrained(temporary)
        (temporary / "README.md").write_text(card(delta, model, task), encoding="utf-8")
        temporary.chmod(0o755)
        target.rmdir()
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        raise DeltaError(f"{target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and target.is_dir() and not any(target.iterdir()):
            target.rmdir()
    return target


def _tokenizer(base: Base) -> Any:
    # A generic tokenizer does not name the segment ids among its outputs, and a pair without them is another input.
    tokenizer = copy.deepcopy(base.tokenizer)
    if base.segments and "token_type_ids" not in tokenizer.model_input_names:
        tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # saved only if it is an argument
    return tokenizer


def _save(delta: Delta, base: Base, model: Model, task: Task, folder: Path) -> None:
    whole = copy.deepcopy(base.encoder if model.pool == "mean" else model.whole)
    encoder = whole if model.pool == "mean" else whole.base_model
    assert isinstance(encoder, nn.Module)
    parameters = dict(encoder.named_parameters())
    with torch.no_grad():
        for name, (index, values) in delta.entries.items():
            write_entries(parameters[name], index, values)
    head = {name.removeprefix(HEAD): torch.from_numpy(np.array(v)) for name, v in delta.head.items()}
    head = _on_label_scale(head, task)
    if model.pool == "mean":
        from safetensors.torch import save_file

        save_file(head, folder / HEAD_FILE)
    else:
        for name, value in head.items():
            owner, _, attribute = name.rpartition(".")
            whole.get_submodule(owner)._parameters[attribute] = nn.Parameter(value)
        _name_labels(whole.config, task)
    whole.save_pretrained(folder)  # type: ignore[operator]


def _on_label_scale(head: dict[str, Tensor], task: Task) -> dict[str, Tensor]:
    # Regression was trained on standardised labels; the last linear layer takes the scale in.
    if task.kind != "regression":
        return head
    final = [name for name in head if name.endswith("weight") and head[name].shape[0] == 1][-1].removesuffix("weight")
    if final + "bias" not in head:
        raise DeltaError("this architecture's head has no bias to carry the labels' mean; use bitfit predict instead")
    scaled = {final + "weight": head[final + "weight"] * task.spread}
    scaled[final + "bias"] = head[final + "bias"] * task.spread + task.center
    return {**head, **scaled}


def _name_labels(config: Any, task: Task) -> None:
    config.num_labels = task.outputs
    if task.kind == "regression":
        config.problem_type = "regression"
    else:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: number for number, label in enumerate(task.labels)}


def card(delta: Delta, model: Model, task: Task) -> str:
    """The model card: what it is, how it was made, how to use it."""
    meta = delta.meta
    main = meta["metrics"]["dev"][meta["metric"]]
    what = f"{meta['trained']:,} of {meta['total']:,} parameters ({meta['trained'] / meta['total']:.3%})"
    labels = ", ".join(f"`{_plain(label)}`" for label in task.labels) or "a number"
    return f"""# {_plain(meta["base"])} fine-tuned by bitfit

{meta["task"].capitalize()} of {"text pairs" if meta["columns"].get("text_pair") else "texts"} into {labels}.
Selection `{_plain(meta["select"])}`, head `{meta["head"]}`: {what} were trained; everything else is the base's own.
Dev {meta["metric"]} {main["value"]:.4f} (95% interval {main["low"]:.4f} to {main["high"]:.4f}).
Texts are cut at {meta["max_length"]} tokens.

## Use

```python
{_usage(delta, model)}```
"""


def _usage(delta: Delta, model: Model) -> str:
    texts = '["first text"], ["second text"]' if delta.meta["columns"].get("text_pair") else '["a text"]'
    encode = (
        f'tokenizer({texts}, padding=True, truncation=True, max_length={delta.meta["max_length"]}, return_tensors="pt")'
    )
    if model.pool != "mean":
        return f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = "."
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
batch = {encode}
with torch.no_grad():
    logits = model(**batch).logits
"""
    return f"""import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

folder = "."
tokenizer = AutoTokenizer.from_pretrained(folder)
encoder = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
head = load_file(folder + "/{HEAD_FILE}")
batch = {encode}
with torch.no_grad():
    hidden = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    logits = mean @ head["classifier.weight"].T + head["classifier.bias"]
"""


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in " .,:*+&@%()-_/" else "?" for c in text)
