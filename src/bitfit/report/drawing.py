"""How figures look and how they are saved: matplotlib's settings, one colour per method, SVG for pages, PNG and PDF.

matplotlib is imported where it is used.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 3.5  # inches: a phone shows a panel at its size
INK, SOFT, LINE = "#1b2430", "#5b6775", "#dde3ea"
MARKERS = "osD^vPX*"
FORMATS = ("png", "pdf")
# Colours of the methods that several studies have.
COLOURS = {
    "Full": "#3b4754",
    "BitFit": "#2f6db5",
    "b_m2, b_q": "#2a9d8f",
    "LayerNorm": "#d1712b",
    "b_LN1, b_LN2": "#b8860b",
    "g_LN1, g_LN2": "#c25b8e",
    "Random": "#b0403a",
    "Random rows and columns": "#e07a5f",
    "randbias": "#6a4c93",
    "Frozen": "#8d99a6",
    "LoRA": "#4f772d",
    "Adapters": "#7b5b46",
    "Diff-Pruning": "#a5478f",
    "AutoFreeze": "#5d6fce",
    "InitBias+BitFit": "#5fa8d3",
    "Full, off": "#8c8c8c",
    "Full, first tenth": "#111111",
    "BitFit, off": "#8fb8e8",
    "BitFit, first tenth": "#153e6f",
    "LayerNorm, off": "#f0a868",
    "LayerNorm, first tenth": "#7a3a0c",
    "g_LN1": "#8a7a1f",
    "g_LN2": "#8f3d7a",
    "g_LN1, g_LN2, BitFit": "#2a8f93",
    "g_LN1, g_LN2, b_m2, b_q": "#3a8f5c",
    "no b_m2, b_q": "#5d6fce",
    "zero b_q": "#1f77b4",
    "zero b_k": "#8c8c8c",
    "zero b_v": "#2ca02c",
    "zero b_m1": "#bcbd22",
    "zero b_LN1": "#d62728",
    "zero b_m2": "#ff7f0e",
    "zero b_m3": "#9467bd",
    "zero b_LN2": "#8c564b",
}
_OTHERS = ("#5d6fce", "#8a7a1f", "#2a8f93", "#a5478f", "#3a8f5c", "#94623c", "#717c3b", "#457b9d")
_STYLE = {
    "font.size": 8,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "bitfit",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure; `words` describe it for readers who cannot see it."""

    title: str
    figure: Figure
    words: str


def colour(method: str) -> str:
    """The colour of a method, the same in every figure of every study."""
    return COLOURS.get(method) or _OTHERS[zlib.crc32(method.encode()) % len(_OTHERS)]


@contextmanager
def style() -> Iterator[None]:
    """Draw and save under our settings, whatever the user's are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # Text stays text, so a letter that matplotlib's font lacks is drawn by the reader's.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def axes(height: float, width: float = WIDTH) -> tuple[Figure, Any]:
    """An empty panel of this height in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def printable(text: str) -> str:
    """A text without the characters that a font cannot draw."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def svg(figure: Figure) -> str:
    """The figure as SVG that may stand in a page whose policy allows no inline style; the same bytes every time."""
    page = io.StringIO()
    with style():
        figure.savefig(page, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = page.getvalue()
    # The XML declaration and the DOCTYPE may not stand inside an HTML page, and a file does without them.
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    text = re.sub(r' style="([^"]*)"', lambda match: _attributes(match[1]), text)
    return re.sub(r' id="(figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|PolyC|LineC|Path)\w*?"', "", text)


def _attributes(rules: str) -> str:
    """The rules of a style attribute as SVG attributes; SVG has one for each rule that matplotlib writes."""
    written = ""
    for rule in rules.split(";"):
        name, _, value = rule.strip().partition(": ")
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            weight = re.search(r"\b(bold|[5-9]00)\b", value)
            written += f' font-size="{size[1]}px"' if size else ""
            written += ' font-weight="bold"' if weight else ""
        elif name and name not in ("font-family", "font-style", "font-variant", "font-stretch"):
            written += f' {name}="{value}"'
    return written


def save(panel: Panel, folder: Path, name: str, kind: str) -> Path:
    """Write a panel for a paper, as PNG or PDF."""
    from ..study.store import slug

    target = folder / f"{slug(name)}-{slug(panel.title)}.{kind}"
    page = io.BytesIO()
    with style():
        metadata = {"Software": None} if kind == "png" else {"CreationDate": None, "Creator": None, "Producer": None}
        panel.figure.savefig(page, format=kind, metadata=metadata)
    files.replace(target, page.getvalue())
    return target
