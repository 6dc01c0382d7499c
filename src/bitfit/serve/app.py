"""The routes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from .middleware import Middleware
from .repository import NAME
from .schemas import PredictRequest, RequestError, parse
from .service import Service
from .settings import Tokens

Name = Annotated[str, Path(description="the task's name", pattern=f"^{NAME.pattern}$")]
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": text}
    for code, text in {
        401: "a token is needed",
        404: "no such task",
        408: "the request did not arrive in time",
        409: "the folder does not allow it",
        413: "too large",
        415: "not JSON",
        421: "not asked as localhost",
        422: "a field is wrong",
        429: "the queue is full; Retry-After says when to try again",
        503: "shutting down, or not ready",
        504: "the deadline has passed",
    }.items()
}
RECEIVING = 256 << 20  # bytes of all requests that are arriving
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(service: Service, tokens: Tokens) -> FastAPI:
    """The service as an ASGI application."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="bitfit serve", version=__version__, lifespan=life, docs_url=None, redoc_url=None, responses=REFUSALS,
        description="One frozen base, many tasks: each text is answered under the delta of the task it names.",
    )  # fmt: skip
    app.add_middleware(Middleware, settings=service.settings, tokens=tokens, metrics=service.metrics)
    _add_errors(app)
    _add_asking(app, service)
    _add_changing(app, service)
    _add_watching(app, service)
    return app


def _add_asking(app: FastAPI, service: Service) -> None:
    schema = PredictRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs")
    wanted = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }

    @app.post("/v1/predict", tags=["ask"], openapi_extra=wanted)
    async def predict(request: Request) -> Response:
        """PredictRequest one task about many texts, or many tasks about a text each; every answer names its version."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "send JSON with Content-Type: application/json", "Content-Type")
        ask = parse(await _body(request, service, service.settings.max_body << 20, service.settings.deadline))
        results = await _while_connected(request, service.predict(ask))
        request.scope["texts"] = len(results)
        return _json({"results": results})

    @app.get("/v1/tasks", tags=["ask"])
    async def tasks(
        search: Annotated[str, Query(max_length=200, description="part of a name or of a label")] = "",
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """The tasks, by name."""
        entries = service.repository.entries.copy()
        wanted = search.casefold()
        names = sorted(n for n, entry in entries.items() if not wanted or _mentions(entry.facts, wanted))
        page = [dict(entries[name].facts) for name in names[offset : offset + limit]]
        return _json({"total": len(names), "tasks": page})

    @app.get("/v1/tasks/{name}", tags=["ask"])
    async def task(name: Name) -> Response:
        """One task."""
        return _json(dict(service.cache.entry(name, "name").facts))


def _add_changing(app: FastAPI, service: Service) -> None:
    file = {
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    }

    @app.put("/v1/tasks/{name}", tags=["change"], openapi_extra=file)
    async def put(name: Name, request: Request) -> Response:
        """Add or replace a task by a delta file; verified before anybody sees it, replaced in one step."""
        async with service.uploading():
            data = await _body(request, service, service.settings.max_delta << 20, 60.0)
            entry, new = await service.put(name, data)
        return _json(dict(entry.facts), 201 if new else 200)

    @app.delete("/v1/tasks/{name}", tags=["change"])
    async def delete(name: Name) -> Response:
        """Remove a task; what was asked before is still answered."""
        gone = await service.delete(name)
        return _json({"name": gone.name, "version": gone.version})


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", tags=["watch"])
    async def healthz() -> Response:
        """Whether the process lives."""
        return _json({"alive": True})

    @app.get("/readyz", tags=["watch"])
    async def readyz() -> Response:
        """Whether requests should come here: a real pass through the base, within a deadline."""
        trouble = await service.trouble()
        return _json({"ready": trouble is None, "trouble": trouble}, 200 if trouble is None else 503)

    @app.get("/metrics", tags=["watch"])
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/stats", tags=["watch"])
    async def stats(request: Request) -> Response:
        """The last minute in numbers, and what the asker may do."""
        own = {
            "queue": service.queue.waiting,
            "tasks": len(service.repository.entries),
            "in_memory": len(service.cache),
        }
        base = service.host.base.name
        return _json({**service.metrics.minute(), **own, "base": base, "may_change": request.scope["may_change"]})

    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        app.get(path, include_in_schema=False)(_page(name))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, refusal: RequestError) -> Response:
        headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        return _json(refusal.body(), refusal.status, headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        return _json(
            RequestError(error.status_code, str(error.detail)).body(), error.status_code, dict(error.headers or {})
        )

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _json(RequestError(422, str(first["msg"])[:300], str(first["loc"][-1])).body(), 422)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _json(RequestError(500, "this is a bug in bitfit; the log says more").body(), 500)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, because a label may hold half a character, which UTF-8 cannot carry.
    return Response(json.dumps(value, separators=(",", ":")), status, headers, "application/json")


async def _body(request: Request, service: Service, most: int, seconds: float) -> bytes:
    """The request's body, refused as soon as it is too large or too slow, or all bodies together are too large."""
    refusal = RequestError(413, f"the request has more than {most >> 20} MB")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > most:
        raise refusal
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk
                service.receiving += len(chunk)
                if len(data) > most:
                    raise refusal
                if service.receiving > RECEIVING:
                    raise RequestError(429, "too much is being received at once; try again", retry_after=1)
    except ClientDisconnect as error:
        raise RequestError(499, "the client left") from error
    except TimeoutError as error:
        raise RequestError(408, f"the request took more than {seconds:g} s to arrive") from error
    finally:
        service.receiving -= len(data)
    return bytes(data)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The work's result; if the client leaves before, the work is dropped."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message says that the client left
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestError(499, "the client left")
    finally:
        gone.cancel()
        task.cancel()


def _mentions(facts: Any, wanted: str) -> bool:
    return wanted in facts["name"] or any(wanted in label.casefold() for label in facts["labels"])


def _page(name: str) -> Any:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    policy = POLICY
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        hashes = [_hash(part) for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)]
        policy += f"; {directive} {' '.join(hashes)}"

    async def page() -> Response:
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})

    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict) and "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if isinstance(schema, dict):
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(value, definitions) for value in schema] if isinstance(schema, list) else schema
