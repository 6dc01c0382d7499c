"""Short texts beside each other in one row: the stock model computes fewer rows where padding would fill them.

Texts of a row do not see each other: the attention mask is block-diagonal. No row is longer than the longest text, so
that attention, whose cost grows with the square of a row, never costs more than with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arrays import Array
from ..model.architectures import RowSharing, architecture

WORTH = 0.9  # with more rows left than this share of them, padding costs less than the larger mask


@dataclass(frozen=True)
class Places:
    """Where the texts of a padded batch stand in shared rows."""

    rows: int
    text: Array  # [rows, width] the text in each place; -1: none
    source: Array  # the place in the padded batch that each place of the rows is filled from
    back: Array  # the place in the rows of each place of the padded batch; its text's first where there is no token

    @classmethod
    def of(cls, lengths: Array) -> Places:
        """Each text, longest first, goes into the first row with room for it."""
        width = int(lengths.max())
        row, start = np.zeros_like(lengths), np.zeros_like(lengths)
        used: list[int] = []
        for i in np.argsort(-lengths, kind="stable").tolist():
            length = int(lengths[i])
            with_room = (number for number, taken in enumerate(used) if taken + length <= width)
            own = next(with_room, len(used))
            used += [0] if own == len(used) else []
            row[i], start[i] = own, used[own]
            used[own] += length
        inside = np.arange(width)
        real = inside < lengths[:, None]
        first = row * width + start
        back = np.where(real, first[:, None] + inside, first[:, None])
        text, source = np.full(len(used) * width, -1), np.zeros(len(used) * width, np.int64)
        text[back[real]] = np.repeat(np.arange(len(lengths)), lengths)
        source[back[real]] = np.flatnonzero(real)
        return cls(len(used), text.reshape(len(used), width), source, back.reshape(-1))


@contextmanager
def sharing_rows(encoder: Any, lengths: Array) -> Iterator[None]:
    """While it is on, the encoder computes a padded batch of texts of these lengths in shared rows, if that pays."""
    style = row_sharing_of(encoder.config)
    places = Places.of(lengths) if len(lengths) > 1 and style is not None else None
    if style is None or places is None or places.rows > WORTH * len(lengths):
        yield
        return
    shared = _Shared(places, style)
    hooks = [
        encoder.register_forward_pre_hook(shared.fill, with_kwargs=True),
        encoder.register_forward_hook(shared.take_apart),
    ]
    if style.masks_embeddings:
        hooks.append(encoder.embeddings.register_forward_pre_hook(_without_mask, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def row_sharing_of(config: Any) -> RowSharing | None:
    """How texts share rows in a model of this configuration; None if they cannot."""
    # A window or a convolution over tokens would reach from one text into the next.
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    local = bool(windows) or bool(getattr(config, "conv_kernel_size", 0))
    return None if local else architecture(config.model_type).row_sharing


@dataclass(frozen=True)
class _Shared:
    places: Places
    style: RowSharing

    def fill(
        self, encoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """The arguments of a padded batch as those of the shared rows."""
        given = {**dict(zip(("input_ids",), args, strict=True)), **given} if args else dict(given)
        device = given["input_ids"].device
        source = torch.from_numpy(self.places.source).to(device)
        for name in ("input_ids", "token_type_ids"):
            if given.get(name) is not None:
                given[name] = given[name].reshape(-1)[source].view(self.places.rows, -1)
        width = self.places.text.shape[1]
        given["position_ids"] = (source % width).view(self.places.rows, width)
        given["attention_mask"] = self._mask(torch.from_numpy(self.places.text).to(device))
        if "use_cache" in given:
            given["use_cache"] = False
        return (), given

    def _mask(self, text: Tensor) -> Tensor:
        seen = (text[:, :, None] == text[:, None, :])[:, None]
        if self.style.causal:
            seen = seen.tril()
        if self.style.boolean_mask:
            return seen.long()
        return torch.zeros(seen.shape, device=text.device).masked_fill_(~seen, torch.finfo(torch.float32).min)

    def take_apart(self, encoder: Any, _: object, out: Any) -> Any:
        """The states of the shared rows as those of a padded batch."""
        states = out.last_hidden_state
        back = torch.from_numpy(self.places.back).to(states.device)
        apart = states.flatten(0, 1).index_select(0, back)
        out.last_hidden_state = apart.view(-1, states.shape[1], states.shape[2])
        if getattr(out, "pooler_output", None) is not None:  # ALBERT's, of each text's first token
            out.pooler_output = encoder.pooler_activation(encoder.pooler(out.last_hidden_state[:, 0]))
        return out


def _without_mask(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**given, "mask": None}
