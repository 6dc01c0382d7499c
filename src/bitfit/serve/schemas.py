"""Requests and responses as JSON: what a body must contain, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import suggest
from ..tasks import KINDS, Text

MAX_ERRORS = 100  # validation errors that are looked at one by one


class RequestError(Exception):
    """A request that is answered with an error: the status, a message, and the field that is wrong."""

    def __init__(self, status: int, message: str, field: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"status": self.status, "message": self.message, "field": self.field}}


@cache
def _field_sets() -> tuple[tuple[str, ...], ...]:
    """The sets of fields that make one input, of all kinds of task."""
    field_sets: dict[tuple[str, ...], None] = {}
    for kind in KINDS.values():
        field_sets.update(dict.fromkeys(kind.fields))
    return tuple(field_sets)


# ---- requests ----


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextInput(_Strict):
    """A text, a pair of texts, a question and its context, or the words of a sentence."""

    text: str | None = None
    text_pair: str | None = None
    question: str | None = None
    context: str | None = None
    words: list[str] | None = Field(None, fail_fast=True)

    def value(self, field: str) -> Text:
        """The input as a task takes it."""
        fields = {name: getattr(self, name) for name in TextInput.model_fields}
        present = {name: value for name, value in fields.items() if value is not None}
        if tuple(present) not in _field_sets():
            choices = ", or ".join(" and ".join(names) for names in _field_sets())
            raise RequestError(422, f"send {choices}", field)
        values = tuple(present.values())
        return values if len(values) == 2 else values[0]


class Item(TextInput):
    """A text and the task that answers it."""

    task: str


class PredictRequest(_Strict):
    """Texts for one task (`task` and `inputs`), or texts for any mix of tasks (`items`)."""

    task: str | None = Field(None, description="the task that answers all inputs")
    inputs: list[str | TextInput] | None = Field(
        None, fail_fast=True, description="texts, or objects for pairs, questions and words"
    )
    items: list[Item] | None = Field(
        None, fail_fast=True, description="instead of task and inputs: texts, each with its task"
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=86_400_000, description="give up after this time, if it is shorter than the server's deadline"
    )

    def __len__(self) -> int:
        return len(self.items or ()) + len(self.inputs or ())

    def texts(self) -> Iterator[tuple[str, str, Text]]:
        """The task, the field and the text of each input."""
        if self.items is not None and self.task is None and self.inputs is None:
            for number, item in enumerate(self.items):
                field = f"items.{number}"
                yield item.task, field, item.value(field)
        elif self.items is None and self.task is not None and self.inputs is not None:
            for number, text in enumerate(self.inputs):
                field = f"inputs.{number}"
                yield self.task, field, text if isinstance(text, str) else text.value(field)
        else:
            raise RequestError(422, "send task and inputs, or items", "task" if self.items is None else "items")


class ListQuery(BaseModel):
    """The page of a list."""

    search: str = Field("", max_length=200, description="text that a name or a label contains")
    offset: int = Field(0, ge=0, le=1 << 40)
    limit: int = Field(100, ge=1, le=1000)


def parse_body(body: bytes) -> PredictRequest:
    """The request of `/v1/predict`; the error for a wrong body names the field."""
    try:
        return PredictRequest.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error, "body") from error


def parse_query(query: dict[str, str]) -> ListQuery:
    """The query string of a list; the error for a wrong one names the parameter."""
    try:
        return ListQuery.model_validate(query)
    except ValidationError as error:
        raise _request_error(error, "query") from error


def _request_error(error: ValidationError, default: str) -> RequestError:
    if error.error_count() > MAX_ERRORS:  # formatting them all takes longer than finding them
        return RequestError(422, f"{error.error_count():,} fields are wrong", default)
    listed = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [each for each in listed if each["type"] == "extra_forbidden"]
    first = (unknown or listed)[0]
    # Pydantic puts the member of a union into the path: `inputs.3.str`.
    path = [str(step) for step in first["loc"] if step not in ("str", "TextInput")]
    message = _unknown_field(path) if unknown else str(first["msg"])
    return RequestError(422, message[:300], ".".join(path) or default)


def _unknown_field(path: list[str]) -> str:
    """The message on a field that does not exist, with the closest one that does."""
    models: dict[str, type[BaseModel]] = {"items": Item, "inputs": TextInput}
    model = models[path[0]] if len(path) > 1 else PredictRequest
    return f'no field "{path[-1][:60]}".{suggest(path[-1], model.model_fields)}'


# ---- responses: the OpenAPI document shows them, and the tests hold the service to them ----


class Answer(BaseModel):
    """The answer of a task to one text. Its further fields depend on the kind of the task."""

    model_config = ConfigDict(extra="allow")

    task: str
    version: str = Field(description="the version of the task that answered")
    error: str | None = Field(None, description="why this text has no answer, though others of the request have one")


class PredictResponse(BaseModel):
    """The answers, in the order of the request."""

    results: list[Answer]


class TaskInfo(BaseModel):
    """A task."""

    name: str
    version: str = Field(description="the first 16 digits of the SHA-256 of its content")
    kind: str
    labels: list[str]
    pairs: bool = Field(description="whether it takes two texts")
    metric: str
    score: float | None = Field(description="on the dev set of its training; null if it was never scored")
    interval: list[float] | None
    select: str
    trained: int = Field(description="parameters trained")
    max_length: int
    bytes: int


class TaskList(BaseModel):
    """A page of tasks, by name."""

    total: int
    tasks: list[TaskInfo]


class UnusedFile(BaseModel):
    """A file of the folder that is not served."""

    file: str
    reason: str


class UnusedFiles(BaseModel):
    """Files of the folder that are not served, by name."""

    total: int
    files: list[UnusedFile]


class Removed(BaseModel):
    """A task that was removed."""

    name: str
    version: str


class Health(BaseModel):
    """Whether the process runs."""

    alive: bool


class Readiness(BaseModel):
    """Whether requests should be sent here."""

    ready: bool
    trouble: str | None


class Stats(BaseModel):
    """The last minute in numbers, and what the caller may do."""

    requests_per_second: float
    texts_per_second: float
    p50_ms: float | None
    p99_ms: float | None
    queue: int
    tasks: int
    unused_files: int
    in_memory: int
    base: str
    may_change: bool


class ErrorDetail(BaseModel):
    """The status, a message, and the field that is wrong."""

    status: int
    message: str
    field: str | None


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: ErrorDetail
