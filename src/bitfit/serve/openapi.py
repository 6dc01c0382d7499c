"""The OpenAPI document: built from the table of routes and the schemas, so that it cannot disagree with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .repository import NAME
from .schemas import ErrorResponse

Handler = Callable[[Request], Awaitable[Response]]
REFERENCE = "#/components/schemas/{model}"
FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
ERRORS = {
    401: "a token is needed",
    403: "the service or the token does not allow changes",
    404: "no such task",
    408: "the request did not arrive in time",
    409: "the folder cannot be changed",
    413: "too large",
    415: "not JSON",
    421: "the Host header is not a loopback name",
    422: "a field is wrong",
    429: "the queue is full; Retry-After says when to try again",
    503: "shutting down, or not ready",
    504: "the deadline has passed",
    507: "the disk is full",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path: who handles it, what it takes, what it returns. The handler's docstring describes it."""

    method: str
    path: str
    handler: Handler
    tag: str
    response: type[BaseModel] | None = None  # None: plain text
    query: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    takes_file: bool = False
    statuses: tuple[int, ...] = (200,)

    @property
    def models(self) -> list[type[BaseModel]]:
        """The schemas it refers to."""
        return [model for model in (self.request, self.response) if model is not None]


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    listed = list(operations)
    paths: dict[str, dict[str, Any]] = {}
    models: list[type[BaseModel]] = [ErrorResponse]
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
        models += operation.models
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "bitfit serve",
            "version": __version__,
            "description": "One frozen base, many tasks: each text is answered under the delta of its task.",
        },
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "operationId": operation.handler.__name__,
        "summary": (operation.handler.__doc__ or "").strip(),
        "parameters": _parameters(operation),
        "responses": _responses(operation),
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json_content(operation.request)}
    if operation.takes_file:
        described["requestBody"] = {"required": True, "content": FILE}
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    if "{name}" in operation.path:
        schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
        listed.append(_parameter("name", "path", {"description": "the name of the task", **schema}, True))
    if operation.query is not None:
        properties: Mapping[str, Any] = operation.query.model_json_schema()["properties"]
        for name, schema in properties.items():
            listed.append(_parameter(name, "query", schema, False))
    return listed


def _parameter(name: str, where: str, schema: Mapping[str, Any], required: bool) -> dict[str, Any]:
    type_of_value = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {
        "name": name,
        "in": where,
        "required": required,
        "description": schema.get("description", ""),
        "schema": type_of_value,
    }


def _responses(operation: Operation) -> dict[str, Any]:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    content = plain if operation.response is None else _json_content(operation.response)
    responses = {str(status): {"description": "the answer", "content": content} for status in operation.statuses}
    error = _json_content(ErrorResponse)
    for status, description in ERRORS.items():
        responses.setdefault(str(status), {"description": description, "content": error})
    return responses


def _json_content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}
