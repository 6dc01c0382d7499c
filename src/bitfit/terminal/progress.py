"""What a person sees while something runs: notes and progress bars on stderr, in a terminal and in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH = 78  # characters of the line that a notebook shows
PAUSE = 0.2  # seconds between two updates

# No markup: texts, labels and file names are data and must come out unchanged. No HTML in notebooks: it would be a
# result of the cell. Notes go above the bar only if both are of one console.
err = Console(stderr=True, markup=False, highlight=False, emoji=False, force_jupyter=False)

Say = Callable[[str], None]
"""Takes a sentence for the user."""


def clean(text: str) -> str:
    """Text without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def counted(count: int, what: str) -> str:
    """A number with its noun: 1 text, 2 texts"""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def note(text: str) -> None:
    """Print a remark to stderr, apart from the result."""
    err.print(Text(clean(text), style="dim"), soft_wrap=not sys.stderr.isatty())


def silent(*_: object) -> None:
    """Show nothing."""


def notes_of(say: Say | None, quiet: bool) -> Say:
    """Where notes go: to the caller's function, else to stderr, or nowhere."""
    if say is not None:
        return say
    return silent if quiet else note


def bar_of(watch: Any | None, quiet: bool, say: Say | None = None) -> AbstractContextManager[Any]:
    """What shows the progress of a training: the caller's function, else a bar on stderr, or nothing."""
    return training_bar(quiet=quiet, say=notes_of(say, quiet)) if watch is None else nullcontext(watch)


@contextmanager
def training_bar(label: str = "training", quiet: bool = False, say: Say = note) -> Iterator[Any]:
    """Loss, best dev score and time left, in a terminal or a notebook; elsewhere a line per stage."""
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with _terminal_bar(label) as watch:
            yield watch
    elif _in_notebook():
        with _notebook_line(label) as watch:
            yield watch
    else:
        yield _stage_lines(label, say)


def _stage_lines(label: str, say: Say) -> Any:
    """A line when a stage of the training begins: a sign of life in a log."""
    begun: set[str] = set()

    def watch(part: int, step: int, total: int, runners: Any) -> None:
        name = _name(label, part, runners)
        if name not in begun:
            begun.add(name)
            say(f"{name}: {counted(total, 'step')}")

    return watch


@contextmanager
def _terminal_bar(label: str) -> Iterator[Any]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=err, transient=True, refresh_per_second=4) as progress:
        bars: dict[tuple[int, str], Any] = {}
        last = 0.0

        def watch(part: int, step: int, total: int, runners: Any) -> None:
            nonlocal last
            bar = part, runners[0].phase
            if bar not in bars:
                bars[bar] = progress.add_task(_name(label, part, runners), total=total, state="")
            if step == total:
                progress.remove_task(bars.pop(bar))
                progress.refresh()  # else the bar would be drawn below every line that follows
            elif time.monotonic() - last > PAUSE:
                last = time.monotonic()
                progress.update(bars[bar], completed=step, state=_state(runners))

        yield watch


@contextmanager
def _notebook_line(label: str) -> Iterator[Any]:
    """A line that is written over: of what moves the cursor, notebooks know the carriage return."""
    last = 0.0

    def watch(part: int, step: int, total: int, runners: Any) -> None:
        nonlocal last
        if step == total or time.monotonic() - last > PAUSE:
            last = time.monotonic()
            line = f"{_name(label, part, runners)} {step:,} of {total:,}  {_state(runners)}"
            print("\r" + line[:WIDTH].ljust(WIDTH), end="", file=sys.stderr, flush=True)

    yield watch
    print("\r" + " " * WIDTH + "\r", end="", file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _name(label: str, part: int, runners: Any) -> str:
    return str(runners[0].phase or (f"{label} {part + 1}" if part else label))


def _state(runners: Any) -> str:
    losses = [runner.history.losses[-1].loss for runner in runners if runner.history.losses]
    best = max(runner.best for runner in runners)
    lanes = f"{len(runners)} trials  " if len(runners) > 1 else ""
    loss = f"loss {losses[-1]:.3f}  " if losses else ""
    return lanes + loss + (f"dev {100 * best:.1f}" if best > -1e9 else "")


@contextmanager
def counting_bar(label: str, quiet: bool = False) -> Iterator[Any]:
    """A progress bar over a number of equal pieces of work; nothing if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=err, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(bar, total=total, completed=done)
