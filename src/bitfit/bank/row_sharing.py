"""Row sharing: several short texts in one row of the stock model, instead of padding.

Texts of a row do not attend to each other: the attention mask is block-diagonal. No row is longer than the longest
text, so that attention, whose cost grows with the square of the row length, never costs more than with padding.
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

MOST_ROWS = 0.9  # if sharing leaves more than this share of the rows, padding is cheaper than the larger mask


@dataclass(frozen=True)
class RowAssignment:
    """The assignment of the texts of a padded batch to shared rows. A position is an index into flattened rows."""

    rows: int
    text: Array  # [rows, width] the text at each position of the shared rows; -1: none
    source: Array  # the position in the padded batch that fills each position of the shared rows
    back: Array  # the position in the shared rows of each position of the padded batch; padding: its text's first token

    @classmethod
    def of(cls, lengths: Array) -> RowAssignment:
        """Assign each text, longest first, to the first row with room for it."""
        width = int(lengths.max())
        row = np.zeros_like(lengths)
        start = np.zeros_like(lengths)
        filled: list[int] = []  # tokens in each row
        for i in np.argsort(-lengths, kind="stable").tolist():
            length = int(lengths[i])
            with_room = (number for number, tokens in enumerate(filled) if tokens + length <= width)
            chosen = next(with_room, len(filled))
            if chosen == len(filled):
                filled.append(0)
            row[i] = chosen
            start[i] = filled[chosen]
            filled[chosen] += length
        position = np.arange(width)
        is_token = position < lengths[:, None]
        first = row * width + start
        back = np.where(is_token, first[:, None] + position, first[:, None])
        text = np.full(len(filled) * width, -1)
        text[back[is_token]] = np.repeat(np.arange(len(lengths)), lengths)
        source = np.zeros(len(filled) * width, np.int64)
        source[back[is_token]] = np.flatnonzero(is_token)
        return cls(len(filled), text.reshape(len(filled), width), source, back.reshape(-1))


@contextmanager
def sharing_rows(encoder: Any, lengths: Array) -> Iterator[None]:
    """In this block the encoder computes a padded batch of texts of these lengths in shared rows, if that is faster."""
    style = row_sharing_of(encoder.config)
    assignment = RowAssignment.of(lengths) if len(lengths) > 1 and style is not None else None
    if style is None or assignment is None or assignment.rows > MOST_ROWS * len(lengths):
        yield
        return
    shared = _Shared(assignment, style)
    hooks = [
        encoder.register_forward_pre_hook(shared.share, with_kwargs=True),
        encoder.register_forward_hook(shared.separate),
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
    # A local window or a convolution over tokens would reach from one text into the next.
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    convolves = bool(getattr(config, "conv_kernel_size", 0))
    if windows or convolves:
        return None
    return architecture(config.model_type).row_sharing


@dataclass(frozen=True)
class _Shared:
    """Hooks of an encoder that compute a padded batch in shared rows."""

    assignment: RowAssignment
    style: RowSharing

    def share(
        self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace the arguments of a padded batch by those of the shared rows."""
        arguments = {**dict(zip(("input_ids",), args, strict=True)), **kwargs} if args else dict(kwargs)
        device = arguments["input_ids"].device
        source = torch.from_numpy(self.assignment.source).to(device)
        rows, width = self.assignment.text.shape
        for name in ("input_ids", "token_type_ids"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].reshape(-1)[source].view(rows, -1)
        arguments["position_ids"] = (source % width).view(rows, width)
        arguments["attention_mask"] = self._mask(torch.from_numpy(self.assignment.text).to(device))
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        return (), arguments

    def _mask(self, text: Tensor) -> Tensor:
        """Which tokens of a row attend to which: those of the same text."""
        visible = (text[:, :, None] == text[:, None, :])[:, None]
        if self.style.causal:
            visible = visible.tril()
        if self.style.boolean_mask:
            return visible.long()
        return torch.zeros(visible.shape, device=text.device).masked_fill_(~visible, torch.finfo(torch.float32).min)

    def separate(self, encoder: Any, _: object, out: Any) -> Any:
        """Replace the states of the shared rows by those of a padded batch."""
        states = out.last_hidden_state
        back = torch.from_numpy(self.assignment.back).to(states.device)
        separated = states.flatten(0, 1).index_select(0, back)
        out.last_hidden_state = separated.view(-1, states.shape[1], states.shape[2])
        if getattr(out, "pooler_output", None) is not None:  # ALBERT's, of each text's first token
            out.pooler_output = encoder.pooler_activation(encoder.pooler(out.last_hidden_state[:, 0]))
        return out


def _without_mask(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "mask": None}
