"""Readers of option values. Each fails with what was expected, such as "abc: expected a whole number"."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import suggest

Reader = Callable[[str], Any]
WHOLE = "a whole number"
NUMBER = "a number"


def expecting(expected: str, read: Reader) -> Reader:
    """A reader whose failure says what was expected."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise ArgumentTypeError(f"{text}: expected {expected}") from None

    return value


def one_of(choices: Iterable[str]) -> Reader:
    """A reader of one of a few words; another word gets a suggestion."""
    known = tuple(choices)

    def value(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text}: not a choice.{suggest(text, known)}")
        return text

    return value


def braces(choices: Iterable[str]) -> str:
    """How help shows the choices of an option: {a,b,c}"""
    return "{" + ",".join(choices) + "}"


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(item) for item in text.split(","))


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(item) for item in text.split(","))


def _rates(text: str) -> tuple[float, ...] | str:
    return text if text in ("paper", "auto") else _numbers(text)


def names(text: str) -> tuple[str, ...]:
    """Names, comma-separated."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


integer = expecting(WHOLE, int)
number = expecting(NUMBER, float)
positive = expecting("a whole number of at least 1", _positive)
numbers = expecting("numbers, comma-separated", _numbers)
positives = expecting("whole numbers of at least 1, comma-separated", _positives)
rates = expecting("paper, auto, or numbers, comma-separated", _rates)
