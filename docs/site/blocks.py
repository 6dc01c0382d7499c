"""The code blocks of the pages: found, run, compared with what the page shows, and written anew.

    python docs/site/blocks.py docs/start.md ...

runs the `console` blocks of these pages in order, in one empty folder, and puts what was printed below each command.
A comment before a block says when it runs:

    <!-- run: slow -->       only with the slow tests: it trains on real weights
    <!-- run: demo -->       Python with the demo base; the `text` block behind it is what it prints
    <!-- run: service -->    requests, against a service with tiny deltas
    <!-- run: no, why -->    never; its commands are still parsed
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- run: (?P<when>[^\n]*?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
SHELL = ("", "console", "sh", "bash")  # languages of blocks that may hold commands
WIDTH = 100  # of the terminal
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e-?\d+)?( (s|min|h)\b)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, when it runs, and where the text stands in the page."""

    language: str
    text: str
    when: str  # "", "slow", "demo", "service" or "no, ..."
    start: int

    @property
    def never(self) -> bool:
        """Whether no test runs it."""
        return self.when.partition(",")[0] == "no"


@dataclass(frozen=True)
class Command:
    """A command line and what the page shows below it."""

    line: str
    output: str

    @property
    def words(self) -> list[str]:
        """The words of the line, without a comment at its end."""
        return shlex.split(self.line, comments=True)


def blocks(path: Path) -> list[Block]:
    """The blocks of a page."""
    text = path.read_text("utf-8")
    return [Block(m["language"], m["text"], m["when"] or "", m.start("text")) for m in BLOCK.finditer(text)]


def commands(block: Block) -> list[Command]:
    """The commands of a block: lines after a prompt `$ `, each with the lines below it."""
    found: list[Command] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append(Command(line[2:].strip(), ""))
        elif found:
            found[-1] = replace(found[-1], output=found[-1].output + line)
    return found


def shown_lines(path: Path) -> Iterator[str]:
    """Every command line of bitfit on a page, in any block of commands."""
    for block in blocks(path):
        if block.language in SHELL:
            joined = block.text.replace("\\\n", " ")
            for match in re.finditer(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*bitfit (.+)$", joined, re.M):
                yield match[1]


def run(command: Command, folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints on a terminal of WIDTH columns, its errors included."""
    words = command.words
    if words[0] == "bitfit":
        words = [sys.executable, "-m", "bitfit", *words[1:]]
    settings = {**os.environ, **environment, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        words, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n" if done.stdout else ""


def without_numbers(text: str) -> str:
    """A text whose numbers and spaces do not matter: machines differ in the last digits and in time."""
    return " ".join(NUMBER.sub("#", text).split())


def rewrite(path: Path) -> None:
    """Run the `console` blocks of a page and put what they print below their commands."""
    text = path.read_text("utf-8")
    changes = []
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(path):
            if block.language != "console" or block.never:
                continue
            made = ""
            for command in commands(block):
                made += f"$ {command.line}\n{run(command, Path(folder), {})}"
            changes.append((block, made))
    for block, made in reversed(changes):
        text = text[: block.start] + made + text[block.start + len(block.text) :]
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
