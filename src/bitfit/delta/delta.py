"""The delta: the values of every entry that differs from the base, the head, and metadata.

Importing, loading and inspecting a delta needs no torch; only `apply` does.
"""

from __future__ import annotations

import html
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
from .hub import local_path
from .meta import Meta, read_meta

if TYPE_CHECKING:
    from ..model.base import Base

INDEX, VALUE = ".index", ".value"


@dataclass(frozen=True, eq=False)
class Delta:
    """The tensors that turn a frozen base into a model of one task, with their metadata."""

    tensors: Mapping[str, Array]  # parameter -> values; sparse: parameter.index and parameter.value; head.*
    meta: Meta

    def __repr__(self) -> str:
        meta = self.meta
        return f"<Delta: {meta.task} on {meta.base}, {meta.select}, {meta.trained:,} of {meta.total:,} parameters>"

    def _repr_html_(self) -> str:
        """A table of facts for notebooks."""
        meta = self.meta
        facts = {
            "task": f"{meta.task}: {', '.join(meta.labels)}" if meta.labels else meta.task,
            "base": meta.base,
            "select": meta.select,
            "trained": f"{meta.trained:,} of {meta.total:,} parameters",
        }
        for split, scores in meta.metrics.items():
            if meta.metric in scores:
                facts[f"{split} {meta.metric}"] = f"{100 * scores[meta.metric].value:.1f}"
        rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(fact)}</td></tr>" for name, fact in facts.items()]
        return f"<table>{''.join(rows)}</table>"

    def save(self, path: str | Path) -> int:
        """Write the file atomically; returns its size in bytes."""
        return safefile.write(Path(path), self.tensors, self.meta.table())

    def encode(self) -> bytes:
        """The bytes `save` would write."""
        return safefile.encode(self.tensors, self.meta.table())

    @classmethod
    def load(cls, path: str | Path) -> Delta:
        """Read a file, or `hf:owner/name` of the hub, and check everything that can be checked without the base."""
        tensors, meta = safefile.read(local_path(path))
        return cls.checked(tensors, meta, str(path))

    @classmethod
    def checked(cls, tensors: Tensors, table: Mapping[str, Any], where: str) -> Delta:
        """The delta of a file's arrays and metadata table; DeltaError if they do not follow the format."""
        meta = read_meta(table, where)
        _check_dtypes(tensors, where)
        return cls(tensors, meta)

    @cached_property
    def entries(self) -> dict[str, tuple[Array | None, Array]]:
        """Encoder parameter -> (flat indices, or None for all entries; values)."""
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
        return self.meta.labels

    @property
    def inject(self) -> str:
        """The parameters that the delta adds to the base, as in --inject."""
        return self.meta.inject

    @property
    def change(self) -> dict[str, list[float | None]]:
        """Mean absolute change per term and layer, terms in the papers' order."""
        order = {term: i for i, term in enumerate(TERMS)}
        terms = sorted(self.meta.change, key=lambda term: order.get(term, len(order)))
        return {term: list(self.meta.change[term]) for term in terms}

    def check(self, base: Base) -> None:
        """Refuse a base that is not the one the delta was trained on, or whose tensors do not fit."""
        from ..model.injection import problem

        base.require_clean()
        meta = self.meta
        if meta.fingerprint != base.fingerprint:
            raise DeltaError(
                f"the delta was trained on {meta.base} ({meta.fingerprint[:12]}), "
                f"not on {base.name} ({base.fingerprint[:12]}); pass the base it was trained on with --base"
            )
        if meta.max_length > base.max_length:
            raise DeltaError(f"the delta reads {meta.max_length} tokens; {base.name} takes at most {base.max_length}")
        grafted = {}
        for name, (index, values) in self.entries.items():
            parameter = base.parameters.get(name)
            shape = base.target.lacking.get(name) if parameter is None else tuple(parameter.shape)
            if shape is None and index is None:
                grafted[name] = values.shape
            else:
                _check_fit(name, index, values, shape)
        if reason := problem(base.target, grafted):
            raise DeltaError(reason)

    def grafts(self, base: Base) -> dict[str, Any]:
        """The torch tensors that the delta adds to the base; entries of a bias that it does not hold are zero."""
        import torch

        device = next(iter(base.parameters.values())).device
        tensors = {}
        for name, (index, values) in self.entries.items():
            if name not in base.parameters:
                tensors[name] = torch.zeros(base.target.lacking.get(name, values.shape), device=device)
                write_entries(tensors[name], index, values)
        return tensors

    def apply(self, base: Base) -> Callable[[], None]:
        """Write the delta into the encoder of the base, without the head; the returned function undoes it exactly."""
        import torch

        from ..model.injection import activation_of, attach

        self.check(base)
        base.applied.append(self.meta.select)
        undos: list[Callable[[], Any]] = [base.applied.clear]
        replaced: list[Any] = []
        replacements: list[Array] = []
        with torch.no_grad():
            for name, (index, values) in self.entries.items():
                if name not in base.parameters:
                    continue
                parameter = base.parameters[name]
                if index is None:
                    replaced.append(parameter)
                    replacements.append(values)
                else:
                    undos.append(partial(parameter.copy_, parameter.detach().clone()))
                    write_entries(parameter, index, values)
            undos.append(replace_tensors(replaced, replacements))
        undos.append(attach(base.target, self.grafts(base), activation_of(base.config)))

        def undo() -> None:
            with torch.no_grad():
                while undos:
                    undos.pop()()

        return undo


def replace_tensors(targets: list[Any], values: list[Array]) -> Callable[[], None]:
    """Overwrite torch tensors with arrays of the same shapes, in one copy; the returned function undoes it."""
    import torch

    if not targets:
        return lambda: None
    before = torch.cat([target if target.dim() == 1 else target.reshape(-1) for target in targets])
    after = torch.from_numpy(np.concatenate([array.reshape(-1) for array in values])).to(before.device)

    def write(flat: Any) -> None:
        pieces = torch.split_with_sizes(flat, [target.numel() for target in targets])
        shaped = []
        for piece, array in zip(pieces, values, strict=True):
            shaped.append(piece if array.ndim == 1 else piece.view(array.shape))
        torch._foreach_copy_(targets, shaped)

    write(after)
    return partial(write, before)


def write_entries(target: Any, index: Array | None, values: Array) -> None:
    """Write values into a torch tensor: all of it, or at flat indices."""
    import torch

    source = torch.from_numpy(np.array(values)).to(target.device, target.dtype)
    if index is None:
        target.copy_(source)
    else:
        target.view(-1)[torch.from_numpy(np.array(index)).to(target.device)] = source


def _check_dtypes(tensors: Tensors, where: str) -> None:
    for name in [name for name in tensors if name.endswith((INDEX, VALUE))]:
        stem = name.removesuffix(INDEX).removesuffix(VALUE)
        is_sparse = stem + INDEX in tensors and stem + VALUE in tensors
        if not is_sparse or stem in tensors:
            raise DeltaError(f"{where}: {stem} must have indices and values, and no other tensor")
    for name, array in tensors.items():
        if (array.dtype.kind == "i") != name.endswith(INDEX):
            raise DeltaError(f"{where}: {name} has the wrong data type ({array.dtype})")


def _check_fit(name: str, index: Array | None, values: Array, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise DeltaError(f"the delta changes {name}, which the base does not have")
    if index is None:
        if values.shape != shape:
            raise DeltaError(f"the delta's {name} has shape {values.shape}, the base's {shape}")
        return
    ascending = index.ndim == 1 and index.shape == values.shape and bool(np.all(index[1:] > index[:-1]))
    if not ascending or (index.size and not 0 <= index[0] <= index[-1] < np.prod(shape)):
        raise DeltaError(f"the delta's indices of {name} are not ascending, or lie outside its shape {shape}")
