"""Workers that train together: each computes its rows of every batch, and only what trains is summed.

Every worker runs the same program and has the same values after every step. Per step they exchange the gradients of the
selected entries and of the heads (one flat vector per lane) and the losses of the lanes. Only the first worker reads
and writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arrays import Array

T = TypeVar("T")


@dataclass
class Group:
    """The rank of this worker, and how many workers train together; by default it is alone."""

    rank: int = 0
    size: int = 1
    bytes: int = field(default=0, init=False)  # of gradients and losses, summed so far
    steps: int = field(default=0, init=False)

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return self.size == 1

    def share(self, count: int) -> slice:
        """Which of `count` rows this worker computes; the shares of workers differ by one row at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_gradients(self, gradients: Tensor, losses: Tensor) -> None:
        """Sum the gradients and the losses of a step over all workers, in place, in one message."""
        if self.alone:
            return
        flat = torch.cat([gradients.reshape(-1), losses]).cpu()
        _distributed().all_reduce(flat)
        gradients.copy_(flat[: gradients.numel()].view_as(gradients))
        losses.copy_(flat[gradients.numel() :])
        self.bytes += flat.nbytes
        self.steps += 1

    def sum_outputs(self, outputs: Array) -> None:
        """Complete an array, in place, in which each worker has filled its rows and left zeros in the others."""
        if not self.alone:
            _distributed().all_reduce(torch.from_numpy(outputs))

    def broadcast(self, values: Tensor) -> None:
        """Give every worker the first one's values."""
        if not self.alone:
            sent = values.cpu()
            _distributed().broadcast(sent, 0)
            values.copy_(sent)

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first worker only and give every worker what it returned."""
        if self.alone:
            return make()
        sent: list[Any] = [make() if self.rank == 0 else None]
        _distributed().broadcast_object_list(sent, 0)
        made: T = sent[0]
        return made


def join(rank: int, size: int, rendezvous: str, timeout: float = 1800.0) -> Group:
    """Join a group; `rendezvous` is where its workers find each other, file:///PATH or tcp://HOST:PORT."""
    if size > 1:
        wait = timedelta(seconds=timeout)
        _distributed().init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=wait)
    return Group(rank, size)


def leave(group: Group) -> None:
    """Leave a group."""
    if not group.alone:
        _distributed().destroy_process_group()


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed
