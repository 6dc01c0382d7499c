"""A page as text: elements that escape what is put into them, tables as HTML and Markdown, the page's frame."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


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
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = join([
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="referrer" content="no-referrer">'),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    ])  # fmt: skip
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{tag("main", *body)}</body></html>\n'


STYLE = """
:root { color-scheme: light; --ink: #1b2430; --soft: #5b6775; --line: #dde3ea; --paper: #fff; --wash: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.25rem; margin: 40px 0 8px; padding-top: 12px; border-top: 2px solid var(--line); }
h3 { font-size: 1.02rem; margin: 24px 0 2px; }
p { margin: 4px 0 10px; max-width: 76ch; }
ul { margin: 4px 0 10px; padding-left: 20px; max-width: 80ch; }
code { font: 0.86em ui-monospace, "SF Mono", Menlo, monospace; background: var(--wash); padding: 1px 4px; border-radius: 4px;
  overflow-wrap: anywhere; }
.lead { color: var(--soft); font-size: 1.02rem; }
.small, small { color: var(--soft); font-size: 0.82rem; }
td small { display: block; line-height: 1.25; white-space: nowrap; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: 6px 0 10px; max-width: max-content; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 6px 12px; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--wash); font-weight: 600; white-space: nowrap; }
th:first-child { text-align: left; white-space: nowrap; position: sticky; left: 0; background: var(--wash); font-weight: 600; }
td.text { text-align: left; } td.text b { font-weight: 400; }
.claim { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; margin: 8px 0; max-width: 860px; break-inside: avoid; }
.claim p { margin: 0; max-width: none; } .claim ul { margin: 4px 0 2px; font-size: 0.9rem; } .claim small { display: block; }
.verdict { border-radius: 999px; padding: 1px 10px; font-size: 0.82rem; font-weight: 600; white-space: nowrap; }
.holds { color: #0f5a33; background: #dff3e7; } .fails { color: #8d1f19; background: #fbe3e1; } .open { color: #6b4f00; background: #fdf1cf; }
td.missing { background: #fbfbfc; }
td.silent { background: #fff6df; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); gap: 16px; margin: 8px 0; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: 10px; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; max-width: 460px; }
figcaption { font-size: 0.85rem; font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }
.empty { color: var(--soft); border: 1px dashed var(--line); border-radius: 8px; padding: 14px; max-width: 76ch; }
.badge { display: inline-block; border-radius: 999px; padding: 1px 10px; background: var(--wash); border: 1px solid var(--line);
  font-size: 0.82rem; margin: 0 6px 6px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 0.82rem; margin: 4px 0; padding: 0; list-style: none; max-width: none; }
.legend svg { width: 12px; height: 12px; vertical-align: -1px; margin-right: 5px; }
@media (max-width: 600px) { main { padding: 16px 12px 40px; } h1 { font-size: 1.4rem; } th, td { padding: 5px 8px; }
  th:first-child { white-space: normal; max-width: 34vw; } }
@media print { body { font-size: 10pt; } main { max-width: none; padding: 0; } .scroll { overflow: visible; border: 0; }
  th:first-child { position: static; } h2, h3 { break-after: avoid; } tr { break-inside: avoid; } }
"""
