"""Pages and tables: templates that escape what is put into them, and the same tables in Markdown."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and a note in small print below it."""

    text: str = ""
    note: str = ""
    kind: str = ""  # a class of the style sheet
    link: str = ""  # a page that the text leads to

    @property
    def plain(self) -> str:
        """Both as one text."""
        return f"{self.text} ({self.note})" if self.text and self.note else self.text or self.note


@dataclass(frozen=True)
class Grid:
    """A table: a name, a caption, heads and rows. `texts` are the columns, counted from 0, that hold no numbers."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    notes: Sequence[str] = ()
    texts: Sequence[int] = (0,)

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows with every cell as a Cell."""
        rows = []
        for row in self.rows:
            rows.append([cell if isinstance(cell, Cell) else Cell(cell) for cell in row])
        return rows

    def markdown(self) -> str:
        """The table in Markdown."""
        marks = ["---" if n in self.texts else "---:" for n in range(len(self.head))]
        lines = [_line([plain(name) for name in self.head]), _line(marks)]
        for row in self.cells:
            lines.append(_line([plain(cell.plain) for cell in row]))
        caption = f"{plain(self.caption)}\n\n" if self.caption else ""
        notes = "".join(f"\n{plain(note)}\n" for note in self.notes)
        return f"### {plain(self.name)}\n\n{caption}" + "\n".join(lines) + f"\n{notes}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def visible(text: object) -> str:
    """A text with every character that does not print made visible."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(text))


def plain(text: object) -> str:
    """A text with the characters escaped that Markdown would read as markup or as the end of a cell.

    A `<` begins a tag only before a letter, `/`, `!` or `?`.
    """
    shown = " ".join(visible(text).split())
    for mark in ("\\", "`", "*", "_", "[", "]", "|"):
        shown = shown.replace(mark, f"\\{mark}")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", shown)


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # finalize sees every value before it is escaped; markup is ours and passes.
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
    )
    environment.globals["style"] = Markup(_style())
    environment.globals["policy"] = _policy()
    return environment


def _style() -> str:
    return (FOLDER / "page.css").read_text(encoding="utf-8")


def _policy() -> str:
    """A Content-Security-Policy that allows the style sheet of the page and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def render(template: str, **values: Any) -> str:
    """A page: no script, no other file."""
    return str(_templates().get_template(template).render(**values))


def markup(svg: str) -> Any:
    """An SVG drawing made here; the template does not escape it."""
    from markupsafe import Markup

    return Markup(svg)
