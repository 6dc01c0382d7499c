"""Export: a delta merged into its base as a plain transformers folder with a model card."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..bank.lanes import lane_of_delta
from ..delta.delta import Delta, write_entries
from ..delta.fold import fold as folded
from ..errors import DeltaError, UsageError
from ..files import check_target
from ..model.anatomy import HEAD
from ..model.architectures import architecture
from ..model.base import Base
from ..model.grafts import layer_of
from ..model.task_model import Model
from ..tasks import Task

HEAD_FILE = "head.safetensors"
INJECTED_FILE = "injected.safetensors"


@dataclass(frozen=True)
class Grown:
    """How an exported model holds biases that its base has no place for."""

    names: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()  # settings of the configuration that make place for some of them
    outside: tuple[str, ...] = ()  # those without a place, in a file of their own


def export(delta: Delta, base: Base, folder: str | Path, fold: bool = False) -> Path:
    """Write the merged model, its tokenizer and a card; all or nothing, and the base stays as it was.

    With `fold` the biases that others can stand for are left as the base has them.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: already exists and is not empty; name another folder with --out")
    task = Task.of_delta(delta)
    model = Model(base, task.outputs, delta.meta.pool)
    lane_of_delta(model, delta)  # the same checks as for wearing it
    if fold:
        delta = folded(delta, model)
    made = not target.exists()
    check_target(target / "README.md")
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        grown = _save(delta, base, model, task, temporary)
        _tokenizer(base).save_pretrained(temporary)
        (temporary / "README.md").write_text(card(delta, base, model, task, grown), encoding="utf-8")
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


def _save(delta: Delta, base: Base, model: Model, task: Task, folder: Path) -> Grown:
    head = {name.removeprefix(HEAD): torch.from_numpy(np.array(v)) for name, v in delta.head.items()}
    head = _on_label_scale(head, task)
    whole = _whole(base, model, task)
    made = copy.deepcopy(base.encoder) if whole is None else whole
    encoder = made if whole is None else whole.base_model
    assert isinstance(encoder, nn.Module)
    grown, left = _make_places(made, encoder, {n: base.slots[n] for n in delta.entries if n in base.slots})
    parameters = {**dict(encoder.named_parameters()), **left}
    with torch.no_grad():
        for name, (index, values) in delta.entries.items():
            if name in parameters:  # a class for tokens leaves a pooler out, which nothing of it would call
                write_entries(parameters[name], index, values)
    if left:
        save_file(left, folder / INJECTED_FILE)
    if whole is None:
        save_file(head, folder / HEAD_FILE)
    else:
        for name, value in _renamed(head, whole, task).items():
            owner, _, attribute = name.rpartition(".")
            whole.get_submodule(owner)._parameters[attribute] = nn.Parameter(value)
        _name_labels(whole.config, task)
    made.save_pretrained(folder)  # type: ignore[operator]
    return grown


def _make_places(whole: Any, encoder: nn.Module, biases: dict[str, tuple[int, ...]]) -> tuple[Grown, dict[str, Tensor]]:
    """Give a model parameters for injected biases where its class can have them; the others are apart, all zeros."""
    prefix = "" if encoder is whole else whole.base_model_prefix + "."
    wanted = {prefix + name for name in biases}
    known = architecture(whole.config.model_type).switches
    switches = [name for name in known if getattr(whole.config, name, None) is False]
    switches = [name for name in switches if biases and wanted & _stock_shapes(whole, name).keys()]
    own = dict(whole.named_parameters())
    for name, shape in _stock_shapes(whole, *switches).items() if switches else ():
        if name not in own:  # a setting makes place for more biases than were asked for: those stay zero
            layer_of(whole, name).register_parameter("bias", nn.Parameter(torch.zeros(shape)))
    for name in switches:
        setattr(whole.config, name, True)
    inside = dict(encoder.named_parameters())
    left = {name: torch.zeros(shape) for name, shape in biases.items() if name not in inside}
    return Grown(tuple(biases), tuple(switches), tuple(left)), left


def _stock_shapes(whole: Any, *switches: str) -> dict[str, tuple[int, ...]]:
    config = copy.deepcopy(whole.config)
    for name in switches:
        setattr(config, name, True)
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in type(whole)(config).named_parameters()}


def transformers_class(base: Base, model: Model, task: Task) -> str | None:
    """The class of transformers that holds the merged model; None if it has none, and the head is a file of its own."""
    name = task.transformers_class
    if model.pool == "cls":
        return name
    if model.pool == "mean" or type(base.config) not in getattr(transformers, name)._model_mapping:
        return None
    whole = _empty(base, name, task)
    return name if len(_linears(whole, task)) == 1 and _fits(base, whole) else None


def _whole(base: Base, model: Model, task: Task) -> nn.Module | None:
    """A model of that class with the base's weights."""
    name = transformers_class(base, model, task)
    if name is None or model.pool == "cls":
        return None if name is None else copy.deepcopy(model.whole)
    whole = _empty(base, name, task).to_empty(device="cpu")
    whole.base_model.load_state_dict(base.encoder.state_dict(), strict=False)  # type: ignore[union-attr]
    return whole


def _empty(base: Base, name: str, task: Task) -> nn.Module:
    config = copy.deepcopy(base.config)
    config.num_labels = task.outputs
    with torch.device("meta"):
        return getattr(transformers, name).from_config(config)  # type: ignore[no-any-return]


def _fits(base: Base, whole: nn.Module) -> bool:
    wanted = whole.base_model.state_dict()  # type: ignore[union-attr]
    return wanted.keys() <= base.encoder.state_dict().keys() and not base.missing & wanted.keys()


def _linears(whole: nn.Module, task: Task) -> list[str]:
    """The linear layers outside the encoder, if they alone make the head."""
    prefix = str(whole.base_model_prefix) + "."
    own = {name: m for name, m in whole.named_modules() if not (name + ".").startswith(prefix) and m._parameters}
    fitting = [n for n, m in own.items() if isinstance(m, nn.Linear) and m.out_features == task.outputs]
    return fitting if len(fitting) == len(own) else []


def _renamed(head: dict[str, Tensor], whole: nn.Module, task: Task) -> dict[str, Tensor]:
    if not task.by_token:
        return head
    name = _linears(whole, task)[0]
    return {f"{name}.{form}": head[f"classifier.{form}"] for form in ("weight", "bias")}


def _on_label_scale(head: dict[str, Tensor], task: Task) -> dict[str, Tensor]:
    # Regression was trained on standardised labels; the last linear layer takes the scale in.
    if (task.center, task.spread) == (0.0, 1.0):
        return head
    final = [name for name in head if name.endswith("weight") and head[name].shape[0] == 1][-1].removesuffix("weight")
    if final + "bias" not in head:
        raise DeltaError("this architecture's head has no bias to carry the labels' mean; use bitfit predict instead")
    scaled = {final + "weight": head[final + "weight"] * task.spread}
    scaled[final + "bias"] = head[final + "bias"] * task.spread + task.center
    return {**head, **scaled}


def _name_labels(config: Any, task: Task) -> None:
    config.num_labels = task.outputs
    if task.problem_type is not None:
        config.problem_type = task.problem_type
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: number for number, label in enumerate(task.labels)}


def card(delta: Delta, base: Base, model: Model, task: Task, grown: Grown) -> str:
    """The model card: what it is, how it was made, how to use it."""
    meta = delta.meta
    main = meta.score
    what = f"{meta.trained:,} of {meta.total:,} parameters ({meta.trained / meta.total:.3%})"
    labels = ", ".join(f"`{_plain(label)}`" for label in task.labels)
    into = task.card.format(texts="text pairs" if meta.pairs else "texts", labels=labels)
    windows = f"Longer inputs are read in windows that share {meta.stride} tokens."
    return f"""# {_plain(meta.base)} fine-tuned by bitfit

{into}
Selection `{_plain(meta.select)}`, head `{meta.head}`: {what} were trained; everything else is the base's own.
Dev {meta.metric} {main.value:.4f} (95% interval {main.low:.4f} to {main.high:.4f}).
{windows if task.by_token else "Texts are cut"} at {meta.max_length} tokens.
{_folded(delta)}{_architecture(grown)}
## Use

```python
{_usage(delta, base, model, task, grown)}```
"""


def _folded(delta: Delta) -> str:
    if not delta.meta.folded:
        return ""
    differ = sum(values.size for _, values in delta.entries.values())
    return f"Biases that others can stand for are folded into those; {differ:,} numbers of the encoder are its own.\n"


def _architecture(grown: Grown) -> str:
    """What a reader must know of a model that is not quite of its base's architecture."""
    if not grown.names:
        return ""
    said = [f"Layers that have no bias in the base have one here: {_by_layer(grown.names)}."]
    if grown.switches:
        settings = ", ".join(f"`{name}`" for name in grown.switches)
        said.append(f"config.json sets {settings} to true, so that the stock classes load them.")
    if grown.outside:
        said.append(
            f"The stock classes have no place for {_by_layer(grown.outside)}: these are in `{INJECTED_FILE}`, and the "
            "lines below add them. Loaded without those lines, this is another model, and a worse one."
        )
    return "\n## What differs from the base's architecture\n\n" + "\n".join(said) + "\n"


def _by_layer(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def _usage(delta: Delta, base: Base, model: Model, task: Task, grown: Grown) -> str:
    name = transformers_class(base, model, task)
    byte_level = "ByteLevel" in base.tokenizer.backend_tokenizer.to_str()
    spaced = ", add_prefix_space=True" if task.form == "words" and byte_level else ""
    load = "from safetensors.torch import load_file\n" if grown.outside or not name else ""
    add = _ADD.format(file=INJECTED_FILE, encoder="model.base_model" if name else "model") if grown.outside else ""
    start = f"""import torch
{load}from transformers import {name or "AutoModel"}, AutoTokenizer

folder = "."
tokenizer = AutoTokenizer.from_pretrained(folder{spaced})
model = {name or "AutoModel"}.from_pretrained(folder, dtype=torch.float32).eval()
{add}batch = tokenizer({task.card_input(delta.meta.pairs)}, max_length={delta.meta.max_length}, return_tensors="pt")
"""
    if name == "AutoModelForQuestionAnswering":
        last = "output = model(**batch)\n    logits = torch.stack([output.start_logits, output.end_logits], -1)"
    elif name:
        last = "logits = model(**batch).logits"
    else:
        start += f'head = load_file(folder + "/{HEAD_FILE}")\n'
        last = _by_hand(task)
    return start + f"with torch.no_grad():\n    {last}\n"


def _by_hand(task: Task) -> str:
    """The lines that do what the head does, where transformers has no class for it."""
    seen = "states = model(**batch).last_hidden_state"
    if not task.by_token:
        seen += """
    mask = batch["attention_mask"].unsqueeze(-1)
    states = (states * mask).sum(1) / mask.sum(1)"""
    return (
        seen
        + """
    logits = states @ head["classifier.weight"].T + head["classifier.bias"]"""
    )


_ADD = """for name, bias in load_file(folder + "/{file}").items():
    layer = {encoder}.get_submodule(name.removesuffix(".bias"))
    layer.register_forward_hook(lambda layer, inputs, output, bias=bias: output + bias)
"""


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in " .,:*+&@%()-_/" else "?" for c in text)
