"""The process of `bitfit serve`: start, listen, stop."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ..delta.delta import Delta
from ..delta.safefile import read_claims
from ..errors import DeltaError, UsageError
from ..model.base import Base, load_base
from ..model.dtypes import FULL
from ..prediction.predictor import base_of
from .app import make_app
from .logs import announce, log, write_to_stderr
from .repository import SUFFIX, Repository
from .service import Service
from .settings import Settings, Tokens

GRACE = 24  # seconds that requests in flight have after a stop signal


class _Server(uvicorn.Server):
    """A server that refuses requests for a while before it closes, so that requests on their way get an answer."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests at once; close after `--drain` seconds, or at the second signal."""
        if self.service.stopping:
            super().handle_exit(sig, frame)
            return
        log("info", "stopping", waiting=self.service.queue.waiting)
        self.service.stopping = True
        timer = threading.Timer(self.service.settings.drain, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and log the URL."""
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce("listening", url=f"http://{shown}:{port}/", tasks=len(self.service.repository.entries))


def serve(folder: Path, base: str | None, settings: Settings, tokens: Tokens, dtype: str | None = None) -> None:
    """Serve a folder of deltas until a stop signal. Requests in flight are answered before the end."""
    tokens.check(settings)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; create it, or pass a folder of deltas")
    with _listen(settings) as listening:
        write_to_stderr(settings.log)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the model threads use the cores
        sys.setswitchinterval(0.0005)  # a thread that reads a file must not wait 5 ms at each step
        import torch

        torch.set_num_threads(1)  # one per model thread: threads of one product wait for each other, passes do not
        loaded = _base(folder, base, dtype)
        service = Service(loaded, Repository(folder, loaded.fingerprint, settings.max_delta << 20), settings)
        config: Any = uvicorn.Config(
            make_app(service, tokens), log_config=None, access_log=False, server_header=False, ws="none",
            proxy_headers=False, timeout_keep_alive=30, timeout_graceful_shutdown=GRACE, lifespan="on",
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # a collection that traverses all of torch stops every thread for 0.3 s
        try:
            service.queue.fork(listening)
            with suppress(KeyboardInterrupt):  # uvicorn raises the stop signal again
                _Server(config, service).run(sockets=[listening])
        finally:
            service.queue.kill_workers()
        announce("stopped")


def _base(folder: Path, spec: str | None, dtype: str | None) -> Base:
    """The base of `--base`, else that of the first usable delta in the folder, stored as in its training."""
    if spec is None and folder.is_dir():
        for path in sorted(folder.glob("*" + SUFFIX)):
            with suppress(DeltaError):
                return base_of(Delta.checked({}, read_claims(path), path.name), None, dtype)
    return load_base(spec, dtype or FULL)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(
            f"--host {settings.host} --port {settings.port}: cannot listen on this address ({error})"
        ) from error
