"""What the tests of the service share: a service that listens in this process, and its answers as numbers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the serve extra")

from bitfit.serve.app import make_app
from bitfit.serve.client import Client
from bitfit.serve.repository import Repository
from bitfit.serve.run import _listen, _Server
from bitfit.serve.service import Service
from bitfit.serve.settings import Settings, Token, Tokens
from support import reviews

CHANGE, ASK = "may-change-0123456789", "may-ask-0123456789"
TEXTS = [text for text, _ in reviews(12)]


@dataclass
class Live:
    """A service that listens, in this process."""

    service: Service
    server: Any
    port: int
    folder: Path

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", CHANGE)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        line.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), given)
        answer = line.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        line.close()
        return found

    def ask(self, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, text = self.call("POST", "/v1/predict", body, **headers)
        return status, json.loads(text)


def started(base: Any, folder: Path, tokens: Tokens | None = None, **settings: Any) -> Live:
    import uvicorn

    chosen = Settings(**{"port": 0, "workers": 2, "watch": 0.05, "drain": 0.0, **settings})
    service = Service(base, Repository(folder, base.fingerprint), chosen)
    listening = _listen(chosen)
    app = make_app(service, tokens or Tokens(change=Token(CHANGE)))
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"), service)
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    until(lambda: server.started)
    return Live(service, server, listening.getsockname()[1], folder)


def until(met: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.01)


def numbers(answer: dict[str, Any]) -> list[float]:
    if "scores" in answer:
        return list(answer["scores"].values() if isinstance(answer["scores"], dict) else answer["scores"])
    return [answer["value"] if "value" in answer else answer["score"]]
