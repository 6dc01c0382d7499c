"""The delta: the values of every entry that differs from the base, the head, and who they belong to.

Importing, loading and inspecting a delta needs no torch; only `apply` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, Tensors
from ..errors import DeltaError
from ..model.anatomy import HEAD, TERMS
from . import safefile

if TYPE_CHECKING:
    from ..model.base import Base

FORMAT = 1

INDEX, VALUE = ".index", ".value"
POOLS = ("cls", "mean", "tokens")  # what a head may see

LABELLED = ("classification", "multilabel", "tagging")  # kinds whose answers are names

# What the metadata must hold, so that a reader can rely on it without looking.
SCHEMA: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "base": str,
    "hub": bool,
    "fingerprint": str,
    "select": str,
    "head": str,
    "init": str,
    "pool": str,
    "task": str,
    "labels": list,
    "columns": dict,
    "center": float,
    "spread": float,
    "max_length": int,
    "metric": str,
    "metrics": dict,
    "trial": dict,
    "trained": int,
    "total": int,
    "change": dict,
    "versions": dict,
}


# What newer deltas hold too; in older ones it is 0.
OPTIONAL: dict[str, type] = {"stride": int}


@dataclass(frozen=True, eq=False)
class Delta:
    """A few hundred kilobytes that turn a frozen base into a model of one task."""

    tensors: Mapping[str, Array]  # parameter -> values; sparse: parameter.index and parameter.value; head.*
    meta: Mapping[str, Any]

    def save(self, path: str | Path) -> int:
        """Write the file all or nothing; its size in bytes."""
        return safefile.write(Path(path), self.tensors, self.meta)

    def encode(self) -> bytes:
        """The bytes `save` would write."""
        return safefile.encode(self.tensors, self.meta)

    @classmethod
    def load(cls, path: str | Path) -> Delta:
        """Read a file and check everything that can be checked without the base."""
        tensors, meta = safefile.read(Path(path))
        return cls.checked(tensors, meta, str(path))

    @classmethod
    def checked(cls, tensors: Tensors, meta: dict[str, Any], where: str) -> Delta:
        """A delta whose metadata and entries are as the format says; DeltaError otherwise."""
        if meta.get("format") != FORMAT:
            raise DeltaError(f"{where}: delta format {meta.get('format')!r}; this bitfit reads format {FORMAT}")
        meta = {**dict.fromkeys(OPTIONAL, 0), **meta}
        for key, kind in (SCHEMA | OPTIONAL).items():
            if not isinstance(meta.get(key), kind) or (kind is not bool and isinstance(meta[key], bool)):
                raise DeltaError(f"{where}: its metadata has no usable {key!r}")
        if not isinstance(meta.get("inject", ""), str):  # deltas made before injection do not have it
            raise DeltaError(f"{where}: its metadata has no usable 'inject'")
        _check_labels(meta["labels"], where)
        if meta["task"] in LABELLED and not meta["labels"]:
            raise DeltaError(f"{where}: a task of kind {meta['task']} without labels")
        if meta["pool"] not in POOLS or not 1 <= meta["max_length"] < 1 << 20:
            raise DeltaError(f"{where}: no head sees {meta['pool']!r} of {meta['max_length']} tokens")
        if not 0 <= meta["stride"] <= max(0, meta["max_length"]) // 2:
            raise DeltaError(
                f"{where}: its windows make no sense (length {meta['max_length']}, stride {meta['stride']})"
            )
        if not 0 <= meta["trained"] <= meta["total"] < 1 << 63 or meta["total"] == 0:
            raise DeltaError(f"{where}: its parameter counts make no sense")
        _check_columns(meta["columns"], where)
        _check_change(meta["change"], where)
        _check_metrics(meta["metrics"], meta["metric"], where)
        _check_dtypes(tensors, where)
        return cls(tensors, meta)

    @cached_property
    def entries(self) -> dict[str, tuple[Array | None, Array]]:
        """Encoder parameter -> (flat indices, or None for the whole tensor; values)."""
        table: dict[str, tuple[Array | None, Array]] = {}
        for name, array in self.tensors.items():
            if name.startswith(HEAD) or name.endswith(INDEX):
                continue
            if name.endswith(VALUE):
                table[name.removesuffix(VALUE)] = (self.tensors[name.removesuffix(VALUE) + INDEX], array)
            else:
                table[name] = (None, array)
        return table

    @property
    def head(self) -> dict[str, Array]:
        """The head's tensors by full name."""
        return {name: array for name, array in self.tensors.items() if name.startswith(HEAD)}

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; empty for regression."""
        return tuple(self.meta["labels"])

    @property
    def inject(self) -> str:
        """Which biases the delta adds to layers that have none, in the selection language."""
        return str(self.meta.get("inject", "none"))

    @property
    def change(self) -> dict[str, list[float | None]]:
        """Mean absolute change per term and layer, terms in the papers' order."""
        table = self.meta["change"]
        return {term: table[term] for term in sorted(table, key=lambda t: TERMS.index(t) if t in TERMS else len(TERMS))}

    def check(self, base: Base) -> None:
        """Refuse a base that is not the one the delta was trained on, or whose tensors do not fit."""
        base.require_clean()
        if self.meta["fingerprint"] != base.fingerprint:
            raise DeltaError(
                f"the delta was trained on {self.meta['base']} ({self.meta['fingerprint'][:12]}), "
                f"not on {base.name} ({base.fingerprint[:12]}); pass its own base with --base"
            )
        if self.meta["max_length"] > base.max_length:
            raise DeltaError(f"the delta reads {self.meta['max_length']} tokens, {base.name} takes {base.max_length}")
        for name, (index, values) in self.entries.items():
            parameter = base.parameters.get(name)
            shape = base.slots.get(name) if parameter is None else tuple(parameter.shape)
            _check_fit(name, index, values, shape)

    def apply(self, base: Base) -> Callable[[], None]:
        """Write the encoder's part of the delta into the base; the answer undoes it, bit for bit."""
        import torch

        self.check(base)
        base.worn.append(str(self.meta["select"]))
        undos: list[Callable[[], Any]] = [base.worn.clear]
        with torch.no_grad():
            own = base.parameters
            whole = {own[n]: values for n, (index, values) in self.entries.items() if index is None and n in own}
            undos.append(write_whole(list(whole), list(whole.values())))
            for name, (index, values) in self.entries.items():
                parameter = own.get(name)
                if parameter is None:
                    undos.append(put_entries(base, name, index, values))
                elif index is not None:
                    undos.append(partial(parameter.copy_, parameter.detach().clone()))
                    write_entries(parameter, index, values)

        def undo() -> None:
            with torch.no_grad():
                while undos:
                    undos.pop()()

        return undo


def write_whole(targets: list[Any], values: list[Array]) -> Callable[[], None]:
    """Put values into torch tensors of their shapes, all of them in one copy; the answer undoes it."""
    import torch

    if not targets:
        return lambda: None
    before = torch.cat([target if target.dim() == 1 else target.reshape(-1) for target in targets])
    after = torch.from_numpy(np.concatenate([own.reshape(-1) for own in values])).to(before.device)

    def write(flat: Any) -> None:
        parts = torch.split_with_sizes(flat, [target.numel() for target in targets])
        shaped = [p if own.ndim == 1 else p.view(own.shape) for p, own in zip(parts, values, strict=True)]
        torch._foreach_copy_(targets, shaped)

    write(after)
    return partial(write, before)


def write_entries(target: Any, index: Array | None, values: Array) -> None:
    """Put values into a torch tensor, whole or at flat indices."""
    import torch

    source = torch.from_numpy(np.array(values)).to(target.device)
    if index is None:
        target.copy_(source)
    else:
        target.view(-1)[torch.from_numpy(np.array(index)).to(target.device)] = source


def put_entries(base: Base, name: str, index: Array | None, values: Array) -> Callable[[], None]:
    """Give a layer of the base an injected bias; the answer undoes it."""
    import torch

    from ..model.grafts import layer_of, put

    bias = torch.zeros(base.slots[name], device=next(base.encoder.parameters()).device)
    write_entries(bias, index, values)
    return put(layer_of(base.encoder, name), bias)


def _check_dtypes(tensors: Tensors, where: str) -> None:
    for name in [name for name in tensors if name.endswith((INDEX, VALUE))]:
        stem = name.removesuffix(INDEX).removesuffix(VALUE)
        if not (stem + INDEX in tensors and stem + VALUE in tensors and stem not in tensors):
            raise DeltaError(f"{where}: {stem} must have both indices and values")
    for name, array in tensors.items():
        if (array.dtype.kind == "i") != name.endswith(INDEX):
            raise DeltaError(f"{where}: {name} has the wrong number type")


def _check_labels(labels: list[Any], where: str) -> None:
    if not all(isinstance(label, str) and _is_text(label) for label in labels):
        raise DeltaError(f"{where}: its labels are not all texts")
    if len(set(labels)) < len(labels):
        raise DeltaError(f"{where}: two of its labels are the same")


def _is_text(label: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in label)


def _check_columns(columns: dict[str, Any], where: str) -> None:
    named = set(columns) == {"text", "text_pair", "label"} and isinstance(columns["text"], str)
    if not named or not all(value is None or isinstance(value, str) for value in columns.values()):
        raise DeltaError(f"{where}: its metadata has no usable 'columns'")


def _check_metrics(metrics: dict[str, Any], metric: str, where: str) -> None:
    leaves = [leaf for part in metrics.values() if isinstance(part, dict) for leaf in part.values()]
    good = all(isinstance(part, dict) for part in metrics.values()) and metric in metrics.get("dev", ())
    if not good or not all(_is_score(leaf) for leaf in leaves):
        raise DeltaError(f"{where}: its scores are not a table of numbers")


def _is_score(leaf: object) -> bool:
    return isinstance(leaf, dict) and set(leaf) == {"value", "low", "high"} and all(map(_is_number, leaf.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1e300 and value == value


def _check_change(change: dict[str, Any], where: str) -> None:
    for row in change.values():
        good = isinstance(row, list) and all(value is None or _is_number(value) for value in row)
        if not good or len(row) > 1000:
            raise DeltaError(f"{where}: its change map is not a table of numbers")


def _check_fit(name: str, index: Array | None, values: Array, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise DeltaError(f"the delta changes {name}, which the base does not have")
    if index is None:
        if values.shape != shape:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, the base's {shape}")
        return
    ordered = index.ndim == 1 and index.shape == values.shape and bool(np.all(index[1:] > index[:-1]))
    if not ordered or (index.size and not 0 <= index[0] <= index[-1] < np.prod(shape)):
        raise DeltaError(f"the delta's entries of {name} do not lie in order inside shape {shape}")
