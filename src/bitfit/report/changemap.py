"""The papers' map of what changed: terms down, layers across, darker where the mean absolute change is larger."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from . import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Change = Mapping[str, Sequence[float | None]]

_EMPTY = "Nothing to map: no term has a recorded change."
_UNITS = "mean absolute change"
_SHADES = "░▒▓█"
_ABSENT = "·"
_OUTSIDE = ("_emb", "_pool", "_other")
_PALETTE = ((247, 251, 255), (107, 174, 214), (8, 48, 107))


def terminal(change: Change, width: int = 80) -> Text:
    """The map for a terminal of this width, readable with and without colour."""
    grid = _Grid.of(change)
    if grid.empty:
        return Text(_EMPTY)
    label = max(map(len, ["layer", *grid.layered, *grid.outside])) + 1
    cell = _widest_cell(grid.layers, width - label)
    lines = [*_heading(grid, cell)]
    per_block = max(1, (width - label) // cell.width)
    for start in range(0, grid.layers, per_block):
        lines += _block(grid, cell, label, range(start, min(start + per_block, grid.layers)))
    if grid.outside:
        lines.append(Text("outside the layers", style="dim"))
        lines += [_row(name, label, [value], grid, _FULL) for name, value in grid.outside.items()]
    return Text("\n").join(lines)


def svg(change: Change, title: str) -> str:
    """The map as SVG text to be put in a page or a file: the same bytes for the same change."""
    with drawing.style():
        return drawing.svg(figure(change, title))


def largest(change: Change) -> float:
    """The largest change of a map; 0 for an empty one."""
    return max((value for value, _ in _Grid.of(change).entries()), default=0.0)


@dataclass(frozen=True)
class _Grid:
    """The change sorted into rows that run over the layers and terms that have a single value."""

    layered: dict[str, list[float | None]]
    outside: dict[str, float | None]
    layers: int

    @classmethod
    def of(cls, change: Change) -> _Grid:
        layers = max(map(len, change.values()), default=0)
        layered, outside = {}, {}
        for name, values in change.items():
            known = [value if value is not None and 0 <= value < math.inf else None for value in values]
            # A model of one layer has one value for every term: then only the name tells.
            if len(known) == 1 and (layers > 1 or name.endswith(_OUTSIDE)):
                outside[drawing.printable(name)] = known[0]
            else:
                layered[drawing.printable(name)] = known + [None] * (layers - len(known))
        return cls(layered, outside, layers if layered else 0)

    def entries(self) -> Iterator[tuple[float, str]]:
        """Every value there is, with the words for where it is."""
        for name, values in self.layered.items():
            yield from ((value, f"{name}, layer {layer}") for layer, value in enumerate(values) if value is not None)
        yield from ((value, name) for name, value in self.outside.items() if value is not None)

    @property
    def empty(self) -> bool:
        return not any(True for _ in self.entries())

    @cached_property
    def top(self) -> float:
        return max(value for value, _ in self.entries())

    def share(self, value: float) -> float:
        """How much of the largest change this is."""
        return value / self.top if self.top > 0 else 0.0


# --- terminal ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """How a value is written: with so many decimals, or as a shade where there is no room for digits."""

    width: int
    decimals: int | None


_FULL = _Cell(5, 2)
_CELLS = (_FULL, _Cell(4, 1), _Cell(2, None), _Cell(1, None))


def _widest_cell(layers: int, room: int) -> _Cell:
    return next((cell for cell in _CELLS if layers * cell.width <= room), _CELLS[-1])


def _unit(grid: _Grid) -> float:
    """The power of ten that leaves one digit before the point of the largest value."""
    if grid.top <= 0:
        return 1.0
    exponent = max(math.floor(math.log10(grid.top)), -300)
    rounds_up = round(grid.top / 10.0**exponent, 1) >= 10
    return 10.0 ** (exponent + rounds_up)


def _heading(grid: _Grid, cell: _Cell) -> Iterator[Text]:
    written = cell.decimals is not None or grid.outside
    yield Text(f"{_UNITS}, in units of {_unit(grid):g}" if written else _UNITS)
    value, where = max(grid.entries(), key=lambda pair: pair[0])
    yield Text(f"largest: {value:.3g} in {where}" if value > 0 else "nothing changed", style="dim")
    if cell.decimals is None:
        steps = ", ".join(f"{shade} {25 * step}%" for step, shade in enumerate(_SHADES, 1))
        yield Text(f"up to {steps} of it; {_ABSENT} absent", style="dim")


def _block(grid: _Grid, cell: _Cell, label: int, layers: range) -> Iterator[Text]:
    yield Text("layer".ljust(label) + _layer_numbers(cell, layers), style="dim")
    for name, values in grid.layered.items():
        yield _row(name, label, [values[layer] for layer in layers], grid, cell)


def _layer_numbers(cell: _Cell, layers: range) -> str:
    if cell.decimals is not None:
        return "".join(str(layer).rjust(cell.width) for layer in layers)
    # Narrow cells have room for a number only every few layers.
    marks = [str(layer).ljust(5 * cell.width) for layer in layers if (layer - layers.start) % 5 == 0]
    return "".join(marks).rstrip()


def _row(name: str, label: int, values: Sequence[float | None], grid: _Grid, cell: _Cell) -> Text:
    line = Text(name.ljust(label))
    for value in values:
        if value is None:
            line.append(_ABSENT.rjust(cell.width))
        else:
            line.append(*_painted(value, grid, cell))
    return line


def _painted(value: float, grid: _Grid, cell: _Cell) -> tuple[str, Style]:
    """A cell's text and colours; a shade takes the colour of its background and shows only where there is none."""
    share = grid.share(value)
    paper = _colour(share)
    if cell.decimals is None:
        return _shade(share) * cell.width, Style(color=paper, bgcolor=paper)
    ink = "#ffffff" if share > 0.5 else "#000000"
    return f"{value / _unit(grid):.{cell.decimals}f}".rjust(cell.width), Style(color=ink, bgcolor=paper)


def _shade(share: float) -> str:
    return _SHADES[min(math.ceil(share * 4), 4) - 1] if share > 0 else " "


def _colour(share: float) -> str:
    low, middle, high = _PALETTE
    start, end, part = (low, middle, share * 2) if share < 0.5 else (middle, high, share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(start, end, strict=True))


# --- figure -----------------------------------------------------------------------------------------------------


def figure(change: Change, title: str, top: float | None = None) -> Figure:
    """The map drawn by matplotlib; `top` is the change of the darkest shade, for maps on one scale."""
    from matplotlib.figure import Figure

    grid = _Grid.of(change)
    rows = len(grid.layered) + len(grid.outside) + (0.8 if grid.outside else 0)
    width = 2.4 + 0.36 * max(grid.layers, 8)
    heading = textwrap.fill(drawing.printable(title), width=int(width * 10))
    height = 1.0 + 0.3 * max(rows, 4) + 0.2 * heading.count("\n")
    drawn = Figure(figsize=(width, height), layout="constrained")
    if heading:
        drawn.suptitle(heading, fontsize=11, parse_math=False)
    if grid.empty:
        drawn.text(0.5, 0.45, _EMPTY, ha="center", va="center", fontsize=9)
    else:
        _draw(drawn, grid, top or grid.top or 1.0)
    return drawn


def _draw(figure: Figure, grid: _Grid, top: float) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # Fewer than 50 colours keep the colour bar a drawing; above, matplotlib embeds a bitmap.
    scale = ScalarMappable(Normalize(0, top), colormaps["Blues"].resampled(48))
    axes = figure.add_subplot()
    axes.grid(visible=False)
    for row, (_, values) in enumerate(grid.layered.items()):
        for layer, value in enumerate(values):
            _square(axes, layer, row, value, scale)
    rows: list[float] = [*range(len(grid.layered))]
    for row, value in enumerate(grid.outside.values()):
        rows.append(len(grid.layered) + 0.8 + row if grid.layered else row)
        _square(axes, 0, rows[-1], value, scale)
        if value is not None:
            beside = (1, rows[-1] + 0.5)
            axes.annotate(f"{value:.3g}", beside, (6, 0), textcoords="offset points", va="center", fontsize=8)
    _label(axes, grid, rows)
    _key(figure, axes, grid, scale)


def _key(figure: Figure, axes: Any, grid: _Grid, scale: Any) -> None:
    """The colour bar, as wide whatever the number of layers."""
    inch = 1 / figure.get_figwidth()
    ticks = None if grid.top > 0 else [0]
    bar: Any = figure.colorbar(scale, ax=axes, ticks=ticks, fraction=0.2 * inch, pad=0.1 * inch, aspect=15)
    bar.set_label(_UNITS, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.get_offset_text().set_fontsize(8)
    bar.solids.set_edgecolor("face")
    bar.outline.set_visible(False)


def _square(axes: Any, column: float, row: float, value: float | None, scale: Any) -> None:
    from matplotlib.patches import Rectangle

    if value is None:
        axes.text(column + 0.5, row + 0.5, "–", ha="center", va="center", fontsize=8, color="#999999")
    else:
        paint = {"facecolor": scale.to_rgba(value), "edgecolor": "#cccccc", "linewidth": 0.5}
        axes.add_patch(Rectangle((column, row), 1, 1, clip_on=False, **paint))


def _label(axes: Any, grid: _Grid, rows: list[float]) -> None:
    columns = max(grid.layers, 1)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows[-1] + 1, 0)
    # Layers are numbered above the map: below it stand terms that belong to none of them.
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    if grid.layers:
        axes.set_xlabel("layer", fontsize=9)
    step = 1 if columns <= 32 else 4
    numbered = range(0, grid.layers, step)
    axes.set_xticks([layer + 0.5 for layer in numbered], labels=[str(layer) for layer in numbered], fontsize=8)
    names = [*grid.layered, *grid.outside]
    axes.set_yticks([row + 0.5 for row in rows], labels=names, fontsize=9, parse_math=False)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
