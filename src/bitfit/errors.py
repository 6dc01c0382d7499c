"""The exceptions a user can meet, each with the exit code the command line gives it.

BitfitError
├── WriteError (1)       a file that cannot be written: a full disk, a missing permission
├── UsageError (2)       a wrong option or value
│   ├── SelectionError   a selection that does not parse, or names something the model does not have
│   └── StudyError       an invalid study file; the message names file and key
├── DataError (3)        a data file, a column, a row or a label that cannot be used
├── ModelError (4)       a base that cannot be found or loaded
│   └── DeltaError       a delta that is damaged or belongs to another base
├── Diverged (5)         no trial survived
├── ServiceError (1)     a service that answered with an error status, or did not answer
└── Interrupted (130)    stopped by the user; can be resumed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 40  # names listed in an error


class BitfitError(Exception):
    """Base of all errors; the message is one line: what is wrong, where, and what to do."""

    exit_code = 1


class WriteError(BitfitError):
    """A file that cannot be written: a full disk, a missing permission."""


class UsageError(BitfitError):
    """A wrong option or value."""

    exit_code = 2


class SelectionError(UsageError):
    """A selection that does not parse, or names something the model does not have."""


class StudyError(UsageError):
    """An invalid study file; the message names file and key."""


class DataError(BitfitError):
    """A file, a column, a row or a label that cannot be used."""

    exit_code = 3


class ModelError(BitfitError):
    """A base that cannot be found or loaded."""

    exit_code = 4


class DeltaError(ModelError):
    """A delta that is damaged or belongs to another base."""


class Diverged(BitfitError):
    """No trial survived."""

    exit_code = 5


class ServiceError(BitfitError):
    """A service that answered with an error, or not at all.

    `status` is the HTTP status (0: no answer), `field` the part of the request that is wrong, `retry_after` the
    seconds after which the service asks to be tried again.
    """

    def __init__(self, status: int, message: str, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.retry_after = retry_after


class Interrupted(BitfitError):
    """Stopped by the user; what was done can be resumed."""

    exit_code = 130


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: ' Did you mean "x"? Known: x, y.'"""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    more = f" and {len(known) - SHOWN:,} more" if len(known) > SHOWN else ""
    # A name with a comma would read as two.
    shown = [f'"{each}"' for each in known] if any("," in each for each in known) else known
    return f"{hint} Known: {', '.join(shown[:SHOWN])}{more}."
