"""Frozen matrices in the blocked layout of oneDNN, in which products with few rows are faster.

Every product with a matrix in its usual layout rearranges the matrix again. A frozen one can be rearranged once. One
thread of an AMD EPYC with AVX-512, 384 inputs and 1,536 outputs, GFLOP/s (LOG.md has more):

    rows       27    64   107   250
    usual      75    92    95    91
    blocked   104   107   111   105

The price is a copy of each matrix for the forward, and one for the backward: above MOST_BYTES the usual layout is used.
All banks on a base share the copies. oneDNN also keeps a kernel of about 0.6 MB for each number of rows: KERNELS limits
them. It is used only on CPUs with AVX-512; others were not measured.

A row's outputs were the same bits among 2 to 2,000 rows, with 1, 2 and 4 threads; in the usual layout, among 4 to
2,000. oneDNN does not promise it: with many threads it may split a long sum, depending on the number of rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

KERNELS = 128  # that oneDNN keeps; its default of 1,024 costs up to 600 MB and saves no time that could be measured
MOST_BYTES = 1 << 30  # of all copies: MiniLM-L6 takes 85 MB, BERT-base 680 MB, BERT-large would take 2.4 GB


class Blocked:
    """Matrices [outputs, inputs] that read the same inputs, with their outputs concatenated."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._state = _state(matrices)

    def is_of(self, matrices: Sequence[Tensor]) -> bool:
        """Whether these are the same matrices, unchanged. A change through `.data` goes unnoticed."""
        return self._state == _state(matrices)

    def outputs(self, x: Tensor, bias: Tensor) -> Tensor:
        """The outputs for rows `x`, with a bias of all rows, [outputs], or of each row, [rows, outputs]."""
        return _product(x, self._forward, bias)

    def input_gradients(self, above: Tensor, added: Tensor | None) -> Tensor:
        """The gradients of the inputs, plus `added`."""
        return _product(above, self._backward, added)

    @cached_property
    def _forward(self) -> Tensor:
        return _reordered(torch.cat(list(self._matrices)))

    @cached_property
    def _backward(self) -> Tensor:
        return _reordered(torch.cat(list(self._matrices)).t().contiguous())


class BlockedMatrices:
    """The blocked copies of an encoder's matrices, each made when it is first used."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        total = sum(matrix.nbytes for matrix in matrices)
        usable = all(matrix.device.type == "cpu" and matrix.dtype == torch.float32 for matrix in matrices)
        self.usable = usable and 2 * total <= MOST_BYTES and has_fast_products()
        self._made: dict[tuple[str, ...], Blocked] = {}

    def get(self, names: Sequence[str], matrices: Sequence[Tensor]) -> Blocked | None:
        """The blocked copy of these matrices of the encoder; None if copies are not used."""
        if not self.usable:
            return None
        key = tuple(names)
        blocked = self._made.get(key)
        if blocked is None or not blocked.is_of(matrices):
            blocked = self._made[key] = Blocked(matrices)
        return blocked


_BY_ENCODER: WeakKeyDictionary[nn.Module, BlockedMatrices] = WeakKeyDictionary()


def blocked_matrices(encoder: nn.Module, matrices: Mapping[str, Tensor]) -> BlockedMatrices:
    """The blocked copies of an encoder's matrices, which all banks on it share."""
    if encoder not in _BY_ENCODER:
        _BY_ENCODER[encoder] = BlockedMatrices(list(matrices.values()))
    return _BY_ENCODER[encoder]


@lru_cache(maxsize=1)
def has_fast_products() -> bool:
    """Whether this CPU and this build of torch have oneDNN's products for AVX-512; BITFIT_BLOCKED=0 says no."""
    if os.environ.get("BITFIT_BLOCKED") == "0":
        return False
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))  # oneDNN reads it at its first product
    operators = torch.ops.mkldnn  # not public: torch's own compiler uses them
    return hasattr(operators, "_linear_pointwise") and hasattr(operators, "_reorder_linear_weight")


def _reordered(matrix: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(matrix, None)  # type: ignore[no-any-return]


def _product(x: Tensor, matrix: Tensor, added: Tensor | None) -> Tensor:
    """x times the transposed matrix, plus what is added to every row or to each of them."""
    linear = torch.ops.mkldnn._linear_pointwise
    if added is not None and added.dim() == 2:
        return linear.binary(x, added, matrix, None, "add")  # type: ignore[no-any-return]
    return linear.default(x, matrix, added, "none", [], "")  # type: ignore[no-any-return]


def _state(matrices: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each matrix lies, and how often it was changed in place; an inference tensor does not count changes."""
    return [(matrix.data_ptr(), -1 if matrix.is_inference() else matrix._version) for matrix in matrices]
