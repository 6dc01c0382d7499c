"""What goes over the wire: requests as they must look, and refusals as they look."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..tasks import KINDS, Text

MOST_ERRORS = 100


class RequestError(Exception):
    """A request that gets no answer: the status, why, and which field is to blame."""

    def __init__(self, status: int, message: str, field: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.retry_after = status, message, field, retry_after

    def body(self) -> dict[str, Any]:
        """The refusal as JSON."""
        return {"error": {"status": self.status, "message": self.message, "field": self.field}}


@cache
def _field_sets() -> tuple[tuple[str, ...], ...]:
    """The fields that inputs of all kinds of task consist of."""
    sets: dict[tuple[str, ...], None] = {}
    for kind in KINDS.values():
        sets.update(dict.fromkeys(kind.fields))
    return tuple(sets)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextInput(_Strict):
    """A text or a pair of texts; a question and its context; or the words of a sentence."""

    text: str | None = None
    text_pair: str | None = None
    question: str | None = None
    context: str | None = None
    words: list[str] | None = Field(None, fail_fast=True)

    def value(self, field: str) -> Text:
        """What the task takes."""
        given = tuple(name for name in TextInput.model_fields if getattr(self, name) is not None)
        if given not in _field_sets():
            choices = ", or ".join(" and ".join(names) for names in _field_sets())
            raise RequestError(422, f"give {choices}", field)
        values = [getattr(self, name) for name in given]
        return tuple(values) if len(values) == 2 else values[0]


class Item(TextInput):
    """A text and the task that is asked about it."""

    task: str


class PredictRequest(_Strict):
    """Texts for one task (`task` and `inputs`), or for any mix of tasks (`items`)."""

    task: str | None = Field(None, description="the task asked about all inputs")
    inputs: list[str | TextInput] | None = Field(
        None, fail_fast=True, description="texts, or objects for pairs and questions"
    )
    items: list[Item] | None = Field(
        None, fail_fast=True, description="instead of task and inputs: each text with its own task"
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=86_400_000, description="give up after this time, if it is sooner than the server's"
    )

    def __len__(self) -> int:
        return len(self.items or ()) + len(self.inputs or ())

    def texts(self) -> Iterator[tuple[str, str, Text]]:
        """Task, field and text of each thing asked."""
        if self.items is not None and self.task is None and self.inputs is None:
            for i, item in enumerate(self.items):
                yield item.task, f"items.{i}", item.value(f"items.{i}")
        elif self.items is None and self.task is not None and self.inputs is not None:
            for i, given in enumerate(self.inputs):
                field = f"inputs.{i}"
                yield self.task, field, given if isinstance(given, str) else given.value(field)
        else:
            raise RequestError(422, "give task and inputs, or items", "items" if self.items is not None else "task")


def parse(body: bytes) -> PredictRequest:
    """A request from its bytes; what is wrong with it names its field."""
    try:
        return PredictRequest.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:  # telling them apart takes longer than finding them
            raise RequestError(422, f"{error.error_count():,} fields are wrong", "body") from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"] if part not in ("str", "TextInput")]
        raise RequestError(422, str(first["msg"])[:300], ".".join(place) or "body") from error
