"""What every request passes through: access control, the headers of every response, metrics and the log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import cast

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .logs import log
from .metrics import Metrics
from .schemas import RequestError
from .settings import Settings, Tokens, is_loopback

PUBLIC = {"/", "/docs", "/openapi.json", "/healthz", "/readyz"}
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
    """Checks the token, completes the response headers, counts and logs the request."""

    def __init__(self, app: ASGIApp, settings: Settings, tokens: Tokens, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.tokens = tokens
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500

        async def send_completed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _complete(message.get("headers", ()))
            await send(message)

        try:
            self._authorize(scope)
        except RequestError as error:
            await _send_error(error, send_completed)
        else:
            await self.app(scope, receive, send_completed)
        finally:
            self._record(scope, status, time.monotonic() - started)

    def _authorize(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self.tokens.predict is None and self.settings.loopback:
            # Against DNS rebinding: a page of another site whose host name resolves to this machine.
            _check_host(headers.get(b"host", b"").decode("latin-1"))
        secret = _bearer(headers)
        may_change = self.tokens.change is not None and self.tokens.change.matches(secret)
        scope["may_change"] = may_change
        if may_change:
            return
        if scope["method"] not in ("GET", "HEAD", "POST"):
            if self.tokens.change is None:
                raise RequestError(403, "tasks cannot be changed: the service was started without BITFIT_CHANGE_TOKEN")
            if self.tokens.predict is not None and self.tokens.predict.matches(secret):
                raise RequestError(403, "this token allows predictions only; changes need the change token")
            raise RequestError(401, "changes need the change token: Authorization: Bearer ...")
        if scope["path"] in PUBLIC or self.tokens.predict is None:
            return
        if not self.tokens.predict.matches(secret):
            raise RequestError(401, "a token is needed: Authorization: Bearer ...")

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        # A client can send any path and method; unknown ones must not become labels of metrics.
        route = getattr(scope.get("route") or _find_route(scope), "path", "other")
        method = scope["method"] if scope["method"] in METHODS else "other"
        texts = scope.get("texts", 0)
        self.metrics.count_request(route, method, status, seconds, texts)
        log("info", "request", method=method, route=route, status=status, ms=round(seconds * 1e3, 1), texts=texts)


def _find_route(scope: Scope) -> BaseRoute | None:
    """The route of a request that was refused before the router saw it."""
    for route in scope["app"].routes:
        if route.matches(scope)[0] is not Match.NONE:
            return cast(BaseRoute, route)
    return None


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else b""


def _check_host(header: str) -> None:
    name, _, port = header.rpartition(":")
    host = name if port.isdigit() else header
    if not is_loopback(host.strip("[]")):
        raise RequestError(421, "without a token, the service answers only to localhost", "Host")


def _complete(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a response, and those of HEADERS that it does not set."""
    by_name = {name.lower(): value for name, value in headers}
    return [*(HEADERS | by_name).items()]


async def _send_error(error: RequestError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
