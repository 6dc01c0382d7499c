"""The gate every request passes: who may ask, what every answer carries, and a line in the log."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .logs import log
from .metrics import Metrics
from .schemas import RequestError
from .settings import Settings, Tokens, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = {"/", "/docs", "/openapi.json", "/healthz", "/readyz"}
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE"}
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}


class Middleware:
    """Stands before the routes."""

    def __init__(self, app: App, settings: Settings, tokens: Tokens, metrics: Metrics) -> None:
        self.app, self.settings, self.tokens, self.metrics = app, settings, tokens, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _complete(message.get("headers", ()))
            await send(message)

        try:
            self._admit(scope)
        except RequestError as refusal:
            await _refuse(refusal, answer)
        else:
            await self.app(scope, receive, answer)
        finally:
            self._note(scope, status, time.monotonic() - began)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self.tokens.ask is None and self.settings.loopback:
            # A page elsewhere whose name is made to mean this machine must not get in.
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        scope["may_change"] = self._may_change(headers)
        changing = scope["method"] not in ("GET", "HEAD", "POST")
        if changing and not scope["may_change"]:
            if self.tokens.change is None:
                raise RequestError(
                    403, "this service was started without BITFIT_CHANGE_TOKEN: its tasks cannot be changed"
                )
            raise RequestError(401, "changes need the change token: Authorization: Bearer ...")
        if scope["path"] not in OPEN and not (scope["may_change"] or self._may_ask(headers)):
            raise RequestError(401, "a token is needed: Authorization: Bearer ...")

    def _may_ask(self, headers: dict[bytes, bytes]) -> bool:
        return self.tokens.ask is None or self.tokens.ask.matches(_bearer(headers))

    def _may_change(self, headers: dict[bytes, bytes]) -> bool:
        return self.tokens.change is not None and self.tokens.change.matches(_bearer(headers))

    def _note(self, scope: Scope, status: int, took: float) -> None:
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in METHODS else "other"
        texts = scope.get("texts", 0)
        self.metrics.answered(path, method, status, took, texts)
        log("info", "request", method=method, route=path, status=status, ms=round(took * 1e3, 1), texts=texts)


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
    return secret.strip() if kind.lower() == b"bearer" else b""


def _check_host(given: str) -> None:
    host = given.rpartition(":")[0] if given.rpartition(":")[2].isdigit() else given
    if not is_loopback(host.strip("[]")):
        raise RequestError(421, "without a token this service answers to localhost only", "Host")


def _complete(headers: Any) -> list[tuple[bytes, bytes]]:
    given = {name.lower(): value for name, value in headers}
    return [*(HEADERS | given).items()]


async def _refuse(refusal: RequestError, send: Send) -> None:
    body = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
