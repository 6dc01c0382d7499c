"""The HTTP interface: the table of routes, what each handler reads and returns, and how errors are written."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware as Layer
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import schemas
from .middleware import Middleware
from .openapi import Handler, Operation, document
from .schemas import RequestError
from .service import Service
from .settings import Tokens

MAX_RECEIVING = 256 << 20  # bytes of all requests that are arriving at the same time
UPLOAD_SECONDS = 60.0  # time for a delta to arrive
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(service: Service, tokens: Tokens) -> Starlette:
    """The service as an ASGI application."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    operations = Handlers(service).operations()
    routes = [Route(each.path, each.handler, methods=[each.method]) for each in operations]
    routes.append(Route("/openapi.json", _static(_json(document(operations)))))
    routes.append(Route("/", _static(_page("page.html"))))
    routes.append(Route("/docs", _static(_page("docs.html"))))
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Layer(Middleware, settings=service.settings, tokens=tokens, metrics=service.metrics)],
        exception_handlers={RequestError: _request_error, HTTPException: _http_error, Exception: _bug},
    )


class Handlers:
    """The functions behind the routes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def operations(self) -> list[Operation]:
        """The table of routes. The table is searched from the top, so the most used route comes first."""
        query = schemas.ListQuery
        info = schemas.TaskInfo
        name = "/v1/tasks/{name}"
        return [
            Operation(
                "POST", "/v1/predict", self.predict, "predict", schemas.PredictResponse, request=schemas.PredictRequest
            ),
            Operation("GET", "/v1/tasks", self.list_tasks, "predict", schemas.TaskList, query=query),
            Operation("GET", name, self.show_task, "predict", info),
            Operation("PUT", name, self.put_task, "change", info, takes_file=True, statuses=(200, 201)),
            Operation("DELETE", name, self.delete_task, "change", schemas.Removed),
            Operation("GET", "/v1/unused", self.list_unused, "watch", schemas.UnusedFiles, query=query),
            Operation("GET", "/v1/stats", self.stats, "watch", schemas.Stats),
            Operation("GET", "/healthz", self.healthz, "watch", schemas.Health),
            Operation("GET", "/readyz", self.readyz, "watch", schemas.Readiness, statuses=(200, 503)),
            Operation("GET", "/metrics", self.metrics, "watch"),
        ]

    async def predict(self, request: Request) -> Response:
        """Answer texts of one task, or texts that each name their task; an answer names the version of its task."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "send JSON with Content-Type: application/json", "Content-Type")
        settings = self.service.settings
        body = await _read_body(request, self.service, settings.max_body << 20, settings.deadline)
        work = self.service.predict(schemas.parse_body(body))
        results = await _while_connected(request, work)
        request.scope["texts"] = len(results)
        return _json({"results": results})

    async def list_tasks(self, request: Request) -> Response:
        """The tasks, by name."""
        query = schemas.parse_query(dict(request.query_params))
        entries = self.service.repository.entries.copy()
        wanted = query.search.casefold()
        names = sorted(name for name, entry in entries.items() if _mentions(entry.info, wanted))
        page = [dict(entries[name].info) for name in names[query.offset : query.offset + query.limit]]
        return _json({"total": len(names), "tasks": page})

    async def show_task(self, request: Request) -> Response:
        """One task."""
        return _json(dict(self.service.cache.entry(request.path_params["name"], "name").info))

    async def put_task(self, request: Request) -> Response:
        """Add or replace a task by a delta file. It is verified first and replaced in one step."""
        async with self.service.upload_slot():
            data = await _read_body(request, self.service, self.service.settings.max_delta << 20, UPLOAD_SECONDS)
            entry, is_new = await self.service.put(request.path_params["name"], data)
        return _json(dict(entry.info), 201 if is_new else 200)

    async def delete_task(self, request: Request) -> Response:
        """Remove a task. Requests that arrived before are still answered."""
        entry = await self.service.delete(request.path_params["name"])
        return _json({"name": entry.name, "version": entry.version})

    async def list_unused(self, request: Request) -> Response:
        """The files of the folder that are not served, each with the reason."""
        query = schemas.parse_query(dict(request.query_params))
        unused = sorted(self.service.repository.unused().items())
        wanted = query.search.casefold()
        listed = [{"file": file, "reason": reason} for file, reason in unused if wanted in file.casefold()]
        return _json({"total": len(listed), "files": listed[query.offset : query.offset + query.limit]})

    async def stats(self, request: Request) -> Response:
        """The last minute in numbers, and what the caller may do."""
        service = self.service
        now = {
            "queue": service.queue.waiting,
            "tasks": len(service.repository.entries),
            "unused_files": len(service.repository.unused()),
            "in_memory": len(service.cache),
            "base": service.host.base.name,
            "may_change": request.scope["may_change"],
        }
        return _json(service.metrics.last_minute() | now)

    async def healthz(self, request: Request) -> Response:
        """Whether the process runs."""
        return _json({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Whether requests should be sent here: a real pass through the base works, and not all files are unused."""
        trouble = await self.service.trouble()
        return _json({"ready": trouble is None, "trouble": trouble}, 200 if trouble is None else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


# ---- errors ----


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _json(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = RequestError(error.status_code, str(error.detail)).body()
    return _json(body, error.status_code, dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    return _json(RequestError(500, "this is a bug in bitfit; the log has the details").body(), 500)


# ---- reading and writing ----


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, because a label may contain a lone surrogate, which UTF-8 cannot encode.
    return Response(json.dumps(value, separators=(",", ":")), status, headers, "application/json")


async def _read_body(request: Request, service: Service, limit: int, seconds: float) -> bytes:
    """The body of a request; RequestError as soon as it, or all bodies together, are too large, or it is too slow."""
    too_large = RequestError(413, f"the request has more than {limit >> 20} MB")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk
                service.receiving += len(chunk)
                if len(data) > limit:
                    raise too_large
                if service.receiving > MAX_RECEIVING:
                    raise RequestError(429, "too many bytes are arriving at once; try again", retry_after=1)
    except ClientDisconnect as error:
        raise RequestError(499, "the client closed the connection") from error
    except TimeoutError as error:
        raise RequestError(408, f"the request took more than {seconds:g} s to arrive") from error
    finally:
        service.receiving -= len(data)
    return bytes(data)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work. If the client disconnects first, the work is cancelled."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(request.receive())  # after the body the next message is the disconnect
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError(499, "the client closed the connection")
    finally:
        disconnect.cancel()
        task.cancel()


def _mentions(info: Any, wanted: str) -> bool:
    """Whether a task's name or a label of it contains the text."""
    return wanted in info["name"] or any(wanted in label.casefold() for label in info["labels"])


def _static(response: Response) -> Handler:
    async def handler(request: Request) -> Response:
        return response

    return handler


def _page(name: str) -> Response:
    """A page whose Content-Security-Policy allows only the style and the script in it, by their hashes."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    policy = POLICY
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        hashes = [_hash(content) for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)]
        policy += f"; {directive} {' '.join(hashes)}"
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
