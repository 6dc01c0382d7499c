"""Model processes: one for each model thread, so that two passes do not wait for one interpreter.

A process is forked from the service and shares the memory of its base. It keeps nothing of a task: what a pass needs
of its lanes travels with the pass, so that a task's values exist once, however many processes there are.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from ..arrays import Array
from ..model.rows import Rows
from ..model.task_model import Model
from ..prediction.host import Host, Resident
from .logs import log


class Closable(Protocol):
    """Something that is open."""

    def close(self) -> None: ...


Batch = Sequence[tuple[Resident, Rows]]
Outputs = Callable[[Batch], list[Array]]
_served: list[Host] = []  # in a model process: the host it was forked with


def can_fork(host: Host) -> bool:
    """Whether model processes work here: a forked process has no use of an accelerator, and macOS forks badly."""
    return sys.platform == "linux" and next(iter(host.base.parameters.values())).device.type == "cpu"


class Worker:
    """A process that computes for one thread. If it dies the thread computes itself: slower, but nothing is lost."""

    def __init__(self, host: Host, others: Sequence[Closable] = ()) -> None:
        context = get_context("fork")
        self._host = host
        self._line, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(host, far, [self, *others]), daemon=True)
        self._process.start()
        far.close()
        self._alive = True

    def outputs(self, batch: Batch) -> list[Array]:
        """As the host's. Whole matrices are not sent about: who wears some is answered here."""
        apart = [place for place, (resident, _) in enumerate(batch) if not resident.dense] if self._alive else []
        found = self._ask([batch[place] for place in apart]) if apart else None
        if found is None:
            return self._host.outputs(batch)
        out = dict(zip(apart, found, strict=True))
        here = [place for place in range(len(batch)) if place not in out]
        out |= zip(here, self._host.outputs([batch[place] for place in here]), strict=True)
        return [out[place] for place in range(len(batch))]

    def close(self) -> None:
        """Close the line to it; a process closes those to its elder siblings, lest they outlive the service."""
        self._line.close()

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()

    def _ask(self, batch: Batch) -> list[Array] | None:
        try:
            self._line.send_bytes(_packed(batch))
            found, error = pickle.loads(self._line.recv_bytes())
        except (EOFError, OSError):
            self._alive = False
            log("error", "a model process died; its thread computes itself", pid=self._process.pid)
            return None
        if error is not None:
            raise RuntimeError(error)
        return found  # type: ignore[no-any-return]


def _serve(host: Host, line: Connection, others: Sequence[Closable]) -> None:
    """Answer until the service is gone. It alone is told to stop: a signal may reach every process of a group."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _served.append(host)
    while True:
        try:
            batch = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        answer: tuple[list[Array] | None, str | None]
        try:
            answer = host.outputs(batch), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        line.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


# ---- how a batch travels: a model by its kind, tensors as arrays; what residents share is written once


def _packed(batch: Batch) -> bytes:
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(list(batch))
    return data.getvalue()


def _named(model: Model) -> tuple[Any, ...]:
    return _model, (model.outputs, model.pool)


def _plain(tensor: Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.numpy(),)


@lru_cache
def _model(outputs: int, pool: str) -> Model:
    return Model(_served[0].base, outputs, pool)


_TABLE: Any = {**copyreg.dispatch_table, Model: _named, Tensor: _plain}
