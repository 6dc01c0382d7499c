"""A base with the head of a task: token rows in, one row of logits per text or per token out."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..arrays import Array
from .anatomy import HEAD, PAIR
from .base import Base, empty_model
from .grafts import GRAFTS, NONE
from .injection import activation_of, attach
from .precision import wide
from .resolution import resolve_pool, selectable
from .rows import Rows

RELATION = 4  # vectors of which the head of a pair reads: u, v, |u - v| and u * v
Owner = tuple[nn.Module, str]
"""A module that holds a parameter, and the name of the parameter in it."""


class Head(nn.Module):
    """One linear layer on the mean of a text's hidden states, on those of a pair, or on the state of every token."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, outputs, device="meta")

    def forward(self, states: Tensor) -> Tensor:
        """The outputs of states, one row each."""
        return self.classifier(self.dropout(states))  # type: ignore[no-any-return]


class _KnownEncoder(nn.Module):
    """Replaces the encoder when the hidden states of the first tokens are known already."""

    def __init__(self, first: Tensor, pooler: nn.Module | None) -> None:
        super().__init__()
        self.first = first[:, None]
        self.pooler = pooler

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.first)
        return BaseModelOutputWithPooling(last_hidden_state=self.first, pooler_output=pooled)


class Model(nn.Module):
    """Encoder and head of one task. The head's parameters are empty: the lanes of a bank provide their values.

    `pool` is what the head reads: each text's mean state ("mean"), what the head of the architecture reads ("cls"),
    the relation of the mean states of two texts ("pair"), each a window of its row, or the state of every token
    ("tokens"); then there is one row of logits per token, text after text.
    """

    def __init__(self, base: Base, outputs: int, pool: str = "auto", inject: str = NONE) -> None:
        super().__init__()
        self.base = base
        self.outputs = outputs
        self.pool = resolve_pool(base, pool)
        self.anatomy = selectable(base, self.pool, inject)
        self.head_model: nn.Module  # the architecture's model with encoder and head; a `Head` unless the pool is "cls"
        if self.pool != "cls":
            width = RELATION * base.width if self.pool == PAIR else base.width
            self.head_model = Head(width, outputs, _dropout(base.config))
            outside = dict(self.head_model.named_modules())
        else:
            self.head_model = empty_model(copy.deepcopy(base.config), outputs)
            prefix = str(self.head_model.base_model_prefix)
            setattr(self.head_model, prefix, base.encoder)
            outside = {
                n: m for n, m in self.head_model.named_modules() if n != prefix and not n.startswith(prefix + ".")
            }
        self.encoder = base.encoder
        self.activation = activation_of(base.config)
        with base.lock:  # no other thread may have swapped in the tensors of a lane
            self.owners = _owners(dict(base.encoder.named_modules()))
            for name, owners in _owners(outside).items():
                self.owners[HEAD + name] = owners
            self._originals = {}
            for name, owners in self.owners.items():
                module, attribute = owners[0]
                self._originals[name] = module._parameters[attribute]
        self.eval()  # a new module is in training mode, in which a head applies dropout

    def forward(self, rows: Rows) -> Tensor:
        """The outputs of token rows: the stock model on a padded batch."""
        batch = self._batch(rows)
        if self.pool == "cls":
            return self.head_model(**batch).logits  # type: ignore[no-any-return]
        hidden = self.encoder(**batch).last_hidden_state
        mask = batch["attention_mask"]
        states = hidden[mask.bool()] if self.pool == "tokens" else _means(hidden, mask)
        return self.head_model(self.head_inputs(states))  # type: ignore[no-any-return]

    def head_inputs(self, states: Tensor) -> Tensor:
        """What the head reads of the pooled states of all windows."""
        return relation(states[0::2], states[1::2]) if self.pool == PAIR else states

    def output_index(self, rows: Rows, chosen: Array) -> Array:
        """The indices of the chosen rows' outputs among the outputs of all rows: one per text, or one per token."""
        return rows.tokens(chosen) if self.pool == "tokens" else chosen

    def output_count(self, rows: Rows) -> int:
        """The number of outputs for these token rows: one per text, or one per token."""
        return len(rows.ids) if self.pool == "tokens" else len(rows)

    def classify(self, states: Tensor) -> Tensor:
        """The head alone, on its inputs; for the head of an architecture, the states of the first tokens."""
        if isinstance(self.head_model, Head):
            return self.head_model(states)  # type: ignore[no-any-return]
        prefix = str(self.head_model.base_model_prefix)
        self.head_model._modules[prefix] = _KnownEncoder(states, getattr(self.encoder, "pooler", None))
        try:
            return self.head_model(None).logits  # type: ignore[no-any-return]
        finally:
            self.head_model._modules[prefix] = self.encoder

    @contextmanager
    def swapped(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace parameters by tensors and attach grafts, by name, while the block runs. One thread at a time."""
        originals: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        grafted = {name: tensor for name, tensor in tensors.items() if name not in self.owners}
        with self.base.lock:
            detach = attach(self.base.target, grafted, self.activation) if grafted else None
            try:
                for name, tensor in tensors.items():
                    if name in grafted:
                        continue
                    for module, attribute in self.owners[name]:
                        originals.append((module, attribute, module._parameters[attribute]))
                        module._parameters[attribute] = tensor  # type: ignore[assignment]
                yield
            finally:
                for module, attribute, parameter in reversed(originals):
                    module._parameters[attribute] = parameter
                if detach is not None:
                    detach()

    def _batch(self, rows: Rows) -> dict[str, Tensor]:
        device = next(self.encoder.parameters()).device
        ids, types, mask = (torch.from_numpy(a).to(device) for a in rows.padded(self.base.tokenizer.pad_token_id))
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.base.segments:
            batch["token_type_ids"] = types
        return batch

    @property
    def injected(self) -> list[str]:
        """The tensors that grafts add to the base."""
        return [name for name in self.anatomy.shapes if name in self.anatomy.injected]

    @property
    def head(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the head's parameters, and of those that the encoder needs and the checkpoint misses."""
        names = [name for name in self.owners if name.startswith(HEAD)]
        for name in sorted(self.base.missing):
            unused = self.pool != "cls" and name.startswith("pooler.")
            if not unused:
                names.append(name)
        return {name: tuple(self.stored(name).shape) for name in names}

    def original(self, name: str) -> Tensor:
        """A parameter of the base in float32; zeros for a tensor of a graft, a placeholder on `meta` for the head's."""
        return wide(self.stored(name))

    def stored(self, name: str) -> Tensor:
        """The same as `original`, but in the data type in which the base stores it."""
        if name in self._originals:
            parameter = self._originals[name]
            assert parameter is not None
            return parameter
        absent_biases = self.base.target.lacking
        shape = absent_biases[name] if name in absent_biases else self.anatomy.shapes[name]
        return torch.zeros(shape, device=next(self.encoder.parameters()).device)

    def graft_starts(self, seed: int) -> dict[str, Tensor]:
        """Seeded start values of the grafts' tensors; without tensors that start at zero and are saved by entry."""
        generator = torch.Generator().manual_seed(seed + 2)
        starts: dict[str, Tensor] = {}
        for site in self.anatomy.sites:
            if site.graft is None:
                continue
            start = GRAFTS[site.graft].start(site, generator)
            if start is not None:
                starts[site.name] = start
        return starts

    def head_start(self, seed: int) -> dict[str, Tensor]:
        """Seeded start values of the head: normal weights, zero biases, as transformers initialises its heads."""
        spread = float(getattr(self.base.config, "initializer_range", 0.02))
        generator = torch.Generator().manual_seed(seed)
        return {name: fresh(name, shape, spread, generator) for name, shape in self.head.items()}


def fresh(name: str, shape: tuple[int, ...], spread: float, generator: torch.Generator) -> Tensor:
    """A newly initialised tensor: zeros for a bias, ones for a gamma, normal for the rest."""
    if name.endswith("bias") and len(shape) == 1:
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(0.0, spread, generator=generator)


def relation(first: Tensor, second: Tensor) -> Tensor:
    """Two texts as [u, v, |u - v|, u * v]; u and v are their states, scaled to a mean square of 1."""
    u, v = _scaled(first), _scaled(second)
    return torch.cat([u, v, (u - v).abs(), u * v], -1)


def _scaled(states: Tensor) -> Tensor:
    return nn.functional.normalize(states, dim=-1) * math.sqrt(states.shape[-1])


def _means(hidden: Tensor, mask: Tensor) -> Tensor:
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _dropout(config: Any) -> float:
    for key in ("classifier_dropout", "hidden_dropout_prob", "dropout"):
        value = getattr(config, key, None)
        if value is not None:
            return float(value)
    return 0.0


def _owners(modules: dict[str, nn.Module]) -> dict[str, list[Owner]]:
    """The owners of every parameter. A parameter that two modules share has two owners, under its first name."""
    first_names: dict[int, str] = {}
    owners: dict[str, list[Owner]] = {}
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            first_name = first_names.setdefault(id(parameter), name)
            owners.setdefault(first_name, []).append((module, attribute))
    return owners
