"""An orderly stop: Ctrl-C and SIGTERM request it, the loop stops at the next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from ..errors import Interrupted

T = TypeVar("T")


class Stop:
    """Whether a stop was requested; a second request stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raise Interrupted if a stop was requested."""
        if self.requested:
            raise Interrupted("stopped; the same command with --resume continues from the last checkpoint")

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """The items one by one, with a check before each."""
        for item in items:
            self.check()
            yield item

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while inside. Only the main thread can; in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
