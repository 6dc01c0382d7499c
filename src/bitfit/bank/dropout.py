"""Keyed dropout: masks are a pure function of lane, site, row and feature, so that they can be computed again anywhere.

A mask depends on the lane's stream, the dropout site (its ordinal in the forward pass), the row in the lane, the
position and the feature; in attention on the head, the query and the key. It does not depend on other lanes, on padding
or on how a batch is laid out. It is the outer product of a key per token and a key per feature, wrapped to 32 bits and
compared with a threshold: one multiplication and one comparison per element, and the backward replays it from the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..arrays import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROW = np.uint64(0xD1B54A32D192ED03)
_SITE = np.uint64(0x8CB92BA72F3D8DD7)
_FEATURE = np.uint64(0xA0761D65)
_HEAD = np.uint64(0xE7037ED1)


def token_keys(stream: int, rows: Array, positions: Array) -> Array:
    """One 64-bit key per token of a lane."""
    start = _mix(np.array([stream], np.uint64))
    row_keys = _mix(start + rows.astype(np.uint64) * _ROW)
    return _mix(row_keys + positions.astype(np.uint64) * _GOLDEN)


class Draws:
    """The masks of a set of tokens, site by site."""

    def __init__(self, tokens: Array, sites: int, device: torch.device) -> None:
        self._keys = _mix(tokens + (np.arange(sites, dtype=np.uint64) * _SITE)[:, None])
        self._device = device
        self._hidden = self._tensor(self._keys.astype(np.uint32))

    def hidden(self, site: int) -> Tensor:
        """Keys [tokens, 1] for a mask over features."""
        return self._hidden[site][:, None]

    def attention(self, site: int, heads: int) -> Tensor:
        """Keys [tokens, heads] of the queries, for a mask over the positions they attend to."""
        by_head = self._keys[site][:, None] * _head_keys(heads)
        return self._tensor((by_head >> np.uint64(32)).astype(np.uint32))

    def _tensor(self, keys: Array) -> Tensor:
        return torch.from_numpy(keys.view(np.int32)).to(self._device)


def pattern(keys: Tensor, width: int) -> Tensor:
    """Random bits [..., width] from keys [..., 1]."""
    return (keys * _feature_keys(width, keys.device)).view(torch.float32)


def masked(x: Tensor, bits: Tensor, p: float) -> Tensor:
    """`x` with the dropped elements set to 0, not yet scaled."""
    # The bits are read as floats, because comparing with a bound and zeroing is then one kernel, that of ReLU's
    # backward.
    return torch.ops.aten.threshold_backward(x, bits, _bound(p))  # type: ignore[no-any-return]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        return _masked(x, keys, p).mul_(1 / (1 - p))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _masked(gradients[0], keys, ctx.p).mul_(1 / (1 - ctx.p)), None, None


def drop(x: Tensor, keys: Tensor | None, p: float) -> Tensor:
    """Dropout of `x` by the keys of its rows; without keys, `x` itself."""
    if keys is None or p == 0:
        return x
    return _Drop.apply(x, keys, p)  # type: ignore[no-any-return, no-untyped-call]


class Keyed(TorchFunctionMode):
    """While it is active, every dropout of a stock model (also inside attention) is keyed by a lane's stream.

    Sites are numbered in the order of the forward pass. Inputs are [rows, features], [rows, positions, features] or
    attention's [rows, heads, queries, keys]. `before` is the number of the first row.
    """

    def __init__(self, stream: int, site: int = 0, before: int = 0) -> None:
        super().__init__()
        self.stream = stream
        self.site = site
        self.before = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return drop(x, self._keys(x), p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert not is_causal and not enable_gqa
        scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value

    def _keys(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        positions = 1 if x.dim() == 2 else x.shape[-2]
        row = self.before + np.arange(rows).repeat(positions)
        tokens = token_keys(self.stream, row, np.tile(np.arange(positions), rows))
        draws = Draws(tokens, self.site + 1, x.device)
        self.site += 1
        if x.dim() == 4:
            heads = x.shape[1]
            return draws.attention(self.site - 1, heads).view(rows, positions, heads).transpose(1, 2)[..., None]
        return draws.hidden(self.site - 1).view(*x.shape[:-1], 1)


def _masked(x: Tensor, keys: Tensor, p: float) -> Tensor:
    return masked(x, pattern(keys, x.shape[-1]), p)


@lru_cache(maxsize=64)
def _bound(p: float) -> float:
    # The float such that 2^32 p of the 2^32 bit patterns are floats not above it: from minus infinity (0xFF800000)
    # towards zero, then from zero up. A NaN pattern is never below it, so its element is kept.
    count = round(p * 2**32)
    negative = 0x7F800001  # patterns of negative floats
    bits = 0xFF800000 - (count - 1) if count <= negative else count - negative
    return float(np.array([bits], np.uint32).view(np.float32)[0])


@lru_cache(maxsize=64)
def _feature_keys(size: int, device: torch.device) -> Tensor:
    keys = _mix(np.arange(size, dtype=np.uint64) * _GOLDEN + _FEATURE).astype(np.uint32) | np.uint32(1)
    with torch.inference_mode(False):
        return torch.from_numpy(keys.view(np.int32)).to(device)


@lru_cache(maxsize=64)
def _head_keys(heads: int) -> Array:
    return _mix(np.arange(heads, dtype=np.uint64) * _GOLDEN + _HEAD) | np.uint64(1)


def _mix(x: Array) -> Array:
    # splitmix64's finaliser; arrays of unsigned integers wrap silently.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
