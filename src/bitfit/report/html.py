"""A page as text: elements that escape what is put into them, tables as HTML and Markdown, the page's frame."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Html(str):
    """Text that is HTML already; everything else is escaped."""


def escape(text: object) -> Html:
    """Any text as HTML that shows it, with what does not print made visible."""
    if isinstance(text, Html):
        return text
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(text))
    return Html(html.escape(shown))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element; `class_` and `view_box` lose or change their underscores."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    named = {"viewBox" if key == "view-box" else key: value for key, value in named.items()}
    text = "".join(f' {key}="{escape(str(value))}"' for key, value in named.items())
    return Html(f"<{name}{text}>{''.join(map(escape, children))}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Several pieces as one."""
    return Html("".join(map(escape, parts)))


@dataclass(frozen=True)
class Cell:
    """A table's cell: the number that counts, and what stands small beside it."""

    text: str = ""
    note: str = ""
    kind: str = ""  # a class of the style sheet

    @property
    def plain(self) -> str:
        """Both as one text."""
        return f"{self.text} ({self.note})" if self.text and self.note else self.text or self.note


@dataclass(frozen=True)
class Grid:
    """A table: a name, a caption, heads and rows."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    def html(self) -> Html:
        """The table for a page, in a frame that scrolls where it is too wide."""
        head = tag("tr", *(tag("th", name, scope="col") for name in self.head))
        body = join(tag("tr", *(_html_cell(cell, n == 0) for n, cell in enumerate(row))) for row in self.rows)
        table = tag("table", tag("thead", head), tag("tbody", body))
        notes = join(tag("p", note, class_="small") for note in self.notes)
        title = join([tag("h3", self.name), tag("p", self.caption, class_="small") if self.caption else ""])
        return tag("section", title, tag("div", table, class_="scroll", tabindex="0"), notes)

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [_line(self.head), _line(["---", *["---:"] * (len(self.head) - 1)], raw=True)]
        lines += [_line([cell.plain if isinstance(cell, Cell) else cell for cell in row]) for row in self.rows]
        title = f"### {plain(self.name)}\n\n" + (f"{plain(self.caption)}\n\n" if self.caption else "")
        return title + "\n".join(lines) + "\n" + "".join(f"\n{plain(note)}\n" for note in self.notes)


def _html_cell(cell: Cell | str, first: bool) -> Html:
    if isinstance(cell, str):
        return tag("th", cell, scope="row") if first else tag("td", cell)
    note = tag("small", cell.note) if cell.note else ""
    return tag("td", tag("b", cell.text) if cell.text else "", note, class_=cell.kind or None)


def _line(cells: Sequence[str], raw: bool = False) -> str:
    return "| " + " | ".join(cell if raw else plain(cell) for cell in cells) + " |"


def plain(text: object) -> str:
    """A text for Markdown: no HTML, no table and no line breaks in it."""
    shown = " ".join(str(escape(text)).split())
    for mark in "|`*_[]":
        shown = shown.replace(mark, f"\\{mark}" if mark != "|" else "&#124;")
    return shown


def page(title: str, body: Iterable[object]) -> str:
    """A whole page: no script, no other file, and a policy that allows neither."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = join([
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="referrer" content="no-referrer">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    ])  # fmt: skip
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{tag("main", *body)}</body></html>\n'
