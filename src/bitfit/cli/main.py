"""The process of a command: its exit code, its one-line errors, its signals and warnings."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any, NoReturn

from ..errors import BitfitError
from .commands import COMMANDS
from .options import parse, parser


def main() -> NoReturn:
    """Run the command line and exit."""
    warnings.showwarning = _warn
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run a command and return its exit code (errors.py lists them); an error is one line on stderr."""
    try:
        if not words:
            parser().print_help()
            return 2
        args = parse(words)
        COMMANDS[args.command](args)
        sys.stdout.flush()
        return 0
    except BitfitError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except MemoryError:
        return _fail("out of memory", 1)
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}", 1)
    except Exception as error:
        if os.environ.get("BITFIT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"this is a bug in bitfit: {what} (BITFIT_DEBUG=1 shows the traceback)", 1)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"bitfit: {_one_line(message)}\n")
    return code


def _one_line(text: str) -> str:
    """The text on one line, without control characters."""
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else "\ufffd" for character in words)


def _drop_output() -> None:
    """Discard what is left of the output: Python would write it once more at exit and fail with another code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {_one_line(str(message))}\n")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
