"""Half precision: the large matrices of a frozen base are stored in 16 bits and computed with in float32.

Stored in 16 bits are the weights of linear layers and the word embeddings, which are nearly all of a base. Biases,
gammas and the small embeddings stay float32: they are what deltas change, and they weigh almost nothing.

A matrix is cast to float32 when its layer is called and the copy is dropped afterwards, in the forward as in the
backward. So every activation, gradient and trained value is float32, and the outputs are those of a float32 base with
rounded weights: bit for bit by the same products, else (`bank/blocked.py`) up to the rounding of sums. Products in
bfloat16 itself would also round every activation; docs/scale.md has the times of both.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UsageError, suggest
from .dtypes import DTYPES

HALF = (torch.bfloat16, torch.float16)
CHUNK = 1 << 17  # numbers that are cast at once: 0.5 MB in float32
See = Callable[[Tensor], None]
"""Is shown the values of a parameter, chunk by chunk."""


def check_dtype(name: str) -> None:
    """Refuse a name that is not one of DTYPES."""
    if name not in DTYPES:
        raise UsageError(f'--dtype: no "{name}".{suggest(name, DTYPES)}')


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32: a copy of a 16-bit tensor, else the tensor itself."""
    return tensor.float() if tensor.dtype in HALF else tensor


def large_matrices(encoder: nn.Module, missing: Collection[str]) -> dict[str, list[nn.Module]]:
    """The matrices to store in half precision: name -> the modules that hold the matrix.

    `missing` are parameters that the checkpoint does not have; they train with the head and stay float32.
    """
    words: nn.Module = encoder.get_input_embeddings()  # type: ignore[operator]
    names: dict[int, str] = {}  # a parameter that two modules share is one matrix, under its first name
    holders: dict[str, list[nn.Module]] = {}
    for path, module in encoder.named_modules():
        name = f"{path}.weight"
        if isinstance(module, nn.Linear | Conv1D) or module is words:
            name = names.setdefault(id(module._parameters["weight"]), name)
            if name not in missing:
                holders.setdefault(name, []).append(module)
    return holders


def store_half(modules: list[nn.Module], dtype: str, see: See) -> None:
    """Store the matrix that these modules share in half precision and let them compute with it in float32."""
    weight = modules[0]._parameters["weight"]
    assert weight is not None
    stored = nn.Parameter(_moved(weight.detach(), getattr(torch, dtype), see), requires_grad=False)
    for module in modules:
        module._parameters["weight"] = stored
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_widen_outputs)
        else:
            module.register_forward_pre_hook(_widen_weight)
            module.register_forward_hook(_restore_weight, always_call=True)


def store_full(parameter: nn.Parameter, see: See) -> None:
    """Store a parameter in float32, apart from the file that it was mapped from."""
    parameter.data = _moved(parameter.data, torch.float32, see)


def _moved(tensor: Tensor, dtype: torch.dtype, see: See) -> Tensor:
    """A copy of a tensor in another type. Chunk by chunk, so that little of it is in memory in both forms.

    `see` gets every chunk before the memory of the original is given back.
    """
    moved = torch.empty(tensor.shape, dtype=dtype)
    for source, target in zip(_chunks(tensor), _chunks(moved), strict=True):
        see(source)
        target.copy_(source)
        release(source)
    return moved


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor, each of about CHUNK numbers."""
    if not tensor.dim() or not tensor.is_contiguous():
        return (tensor,)
    numbers_per_row = max(1, tensor[0].numel())
    return torch.split(tensor, max(1, CHUNK // numbers_per_row))


def release(tensor: Tensor) -> None:
    """Return the memory of an unused tensor to the system, if the tensor is mapped from a file.

    The tensors of a file share one mapping, which would otherwise stay in memory until the last of them is deleted.
    """
    if tensor.device.type != "cpu" or _madvise() is None:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:  # whole pages only: their edges belong to other tensors
        _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


# The hooks keep what they need on the module, so that a copy of an encoder works as the encoder does.


def _widen_outputs(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return wide(out)


def _widen_weight(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight = module._parameters["weight"]
    if weight is not None and weight.dtype in HALF:
        module.__dict__["_stored_weight"] = weight
        module._parameters["weight"] = wide(weight)  # type: ignore[assignment]
    return tuple(wide(x) for x in inputs)  # some layers cast their inputs to the type of the weight


def _restore_weight(module: nn.Module, _: Any, __: Any) -> None:
    stored = module.__dict__.pop("_stored_weight", None)
    if stored is not None:
        module._parameters["weight"] = stored
