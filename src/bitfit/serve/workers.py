"""Model processes: one for each model thread, so that two passes do not wait for one interpreter.

A process is forked from the service and shares the memory of its base, but not the blocked copies of its matrices. It
stores nothing of a task: the lanes of a pass are sent with the pass, so that a task's values exist once, however many
processes there are.

Service and process exchange pickles. That is safe here and nowhere else: the pipe is anonymous, only the service and
the process that it forked hold its ends, and each pickle is made by this module from values that were validated before.
No byte of a request or of a delta file is ever unpickled.
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
    """Something that can be closed."""

    def close(self) -> None: ...


Batch = Sequence[tuple[Resident, Rows]]
Outputs = Callable[[Batch], list[Array]]
_host_of_process: list[Host] = []  # in a model process: the host it was forked with


def can_fork(host: Host) -> bool:
    """Whether model processes work here: a forked process cannot use an accelerator, and fork is unsafe on macOS."""
    return sys.platform == "linux" and next(iter(host.base.parameters.values())).device.type == "cpu"


class Worker:
    """A process that computes for one thread. If it dies, the thread computes itself: slower, but nothing is lost.

    `inherited` is what the new process must close: files and workers that exist already.
    """

    def __init__(self, host: Host, inherited: Sequence[Closable] = ()) -> None:
        context = get_context("fork")
        self._host = host
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(host, far_end, [self, *inherited]), daemon=True)
        self._process.start()
        far_end.close()
        self._alive = True

    def outputs(self, batch: Batch) -> list[Array]:
        """The same as the host's `outputs`. Dense residents are too large to send, so the host computes them here."""
        sent = [index for index, (resident, _) in enumerate(batch) if not resident.dense]
        computed = None
        if sent and self._alive:
            computed = self._compute([batch[index] for index in sent])
        if computed is None:
            return self._host.outputs(batch)
        outputs = dict(zip(sent, computed, strict=True))
        rest = [index for index in range(len(batch)) if index not in outputs]
        outputs |= zip(rest, self._host.outputs([batch[index] for index in rest]), strict=True)
        return [outputs[index] for index in range(len(batch))]

    def close(self) -> None:
        """Close the pipe. A process closes inherited pipes of earlier workers, which would keep them alive."""
        self._pipe.close()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _compute(self, batch: Batch) -> list[Array] | None:
        """The outputs that the process computes; None if it has died."""
        try:
            self._pipe.send_bytes(_pickled(batch))
            outputs, error = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._alive = False
            log("error", "a model process died; its thread computes itself", pid=self._process.pid)
            return None
        if error is not None:
            raise RuntimeError(error)
        return outputs  # type: ignore[no-any-return]


def _serve(host: Host, pipe: Connection, inherited: Sequence[Closable]) -> None:
    """The model process: compute until the service closes the pipe.

    Stop signals are ignored, because they may reach every process of a group and the service still needs its answers.
    """
    for resource in inherited:
        resource.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _host_of_process.append(host)
    while True:
        try:
            batch = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        reply: tuple[list[Array] | None, str | None]
        try:
            reply = host.outputs(batch), None
        except Exception as error:
            reply = None, f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


# ---- how a batch is pickled: a model by its shape, tensors as arrays; what residents share is written once ----


def _pickled(batch: Batch) -> bytes:
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(list(batch))
    return data.getvalue()


def _reduce_model(model: Model) -> tuple[Any, ...]:
    return _model_of_process, (model.outputs, model.pool)


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.numpy(),)


@lru_cache
def _model_of_process(outputs: int, pool: str) -> Model:
    return Model(_host_of_process[0].base, outputs, pool)


_TABLE: Any = {**copyreg.dispatch_table, Model: _reduce_model, Tensor: _reduce_tensor}
