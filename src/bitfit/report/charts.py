"""Charts as inline SVG, drawn by hand: 340 wide, so that a phone shows them at their size. No torch, no matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .html import Html, join, tag
from .statistics import median

WIDTH = 340
COLOURS = ("#2f6db5", "#d1712b", "#3a8f5c", "#a5478f", "#b0403a", "#5d6fce", "#8a7a1f", "#2a8f93", "#7b5b46", "#6b7683")
INK, SOFT, LINE = "#1b2430", "#5b6775", "#dde3ea"
Point = tuple[float, float]
Scale = Callable[[float], float]
Place = Callable[[Point], Point]


@dataclass(frozen=True)
class Bar:
    """One bar: a mean with its interval, and the published value where there is one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    published: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: str = COLOURS[0]
    bold: bool = True
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    dashed: bool = False


def colour(number: int) -> str:
    """The colour of the how-manieth method."""
    return COLOURS[number % len(COLOURS)]


def figure(title: str, drawing: Html) -> Html:
    """A chart with its title."""
    return tag("figure", tag("figcaption", title), drawing)


def legend(names: Mapping[str, str]) -> Html:
    """Names with their colours."""
    items = (tag("li", tag("svg", tag("rect", width=12, height=12, rx=2, fill=c), view_box="0 0 12 12"), name)
             for name, c in names.items())  # fmt: skip
    return tag("ul", *items, class_="legend")


def bars(rows: Sequence[Bar], baseline: float | None = None, unit: str = "") -> Html:
    """Lying bars with error bars; a diamond is the published value, the dashed line the majority class."""
    known = [x for bar in rows for x in (bar.value, bar.low, bar.high, bar.published) if x is not None]
    known += [baseline] if baseline is not None else []
    low, high = _reach(known, zero=False)
    left, right, step = _label_width([bar.label for bar in rows]), WIDTH - 42, 22
    height = step * len(rows) + 26
    at = _scale(low, high, left, right)
    parts = [_grid_line(at(tick), 4, height - 20, _number(tick)) for tick in _ticks(low, high)]
    for n, bar in enumerate(rows):
        parts.append(_bar(bar, 4 + n * step, at, low, colour(n)))
    if baseline is not None:
        x = at(baseline)
        parts.append(tag("line", x1=_n(x), x2=_n(x), y1=2, y2=height - 20, stroke=INK, stroke_dasharray="3 3"))
    parts.append(_text(WIDTH - 4, height - 8, unit, anchor="end", fill=SOFT) if unit else Html(""))
    return _svg(height, parts, f"Bars: {', '.join(f'{b.label} {b.value:.1f}' for b in rows)}")


def _bar(bar: Bar, y: float, at: Scale, low: float, paint: str) -> Html:
    start, end = at(low), at(bar.value)
    parts = [
        _text(start - 6, y + 13, _short(bar.label, 20), anchor="end"),
        tag("rect", x=_n(start), y=_n(y + 2), width=_n(max(1.0, end - start)), height=15, fill=paint, rx=2),
        _text(WIDTH - 4, y + 13, f"{bar.value:.1f}{bar.note}", anchor="end"),
    ]
    if bar.low is not None and bar.high is not None:
        a, b, middle = at(bar.low), at(bar.high), y + 9.5
        parts.append(_path([(a, middle), (b, middle)], INK, 1.4))
        parts += [_path([(x, middle - 4), (x, middle + 4)], INK, 1.4) for x in (a, b)]
    if bar.published is not None:
        x, middle = at(bar.published), y + 9.5
        shape = f"M{_n(x)} {_n(middle - 5)}l5 5l-5 5l-5 -5z"
        parts.append(
            tag(
                "path", tag("title", f"published {bar.published:g}"), d=shape, fill="#fff", stroke=INK, stroke_width=1.2
            )
        )
    return join(parts)


def lines(curves: Sequence[Curve], x_name: str, y_name: str, log: bool = False, rows: Sequence[float] = ()) -> Html:
    """Curves over epochs or sizes; thin ones first, bold ones on top, bands where intervals are known."""
    shown = [c for c in curves if c.points]
    if not shown:
        return tag("p", "No values yet.", class_="small")
    change = math.log10 if log else float
    every = [point for c in shown for part in (c.points, c.low, c.high) for point in part]
    low, high = _reach([y for _, y in every], zero=False)
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    across = _scale(change(x_low), change(x_high) if x_high > x_low else change(x_low) + 1, 40, WIDTH - 18)
    down, height = _scale(low, high, 168, 10), 208
    parts = [_shelf(down(tick), _number(tick)) for tick in _ticks(low, high, 4)]
    marks = sorted(set(rows)) if log else _ticks(x_low, x_high, 5)
    parts += [
        _text(across(change(x)), 184, _number(x), anchor="middle", fill=SOFT) for x in _spaced(marks, across, change)
    ]
    parts.append(_text((40 + WIDTH - 18) / 2, 202, x_name, anchor="middle", fill=SOFT))
    parts.append(_text(4, 8, y_name, fill=SOFT, size=10))
    for curve in sorted(shown, key=lambda c: c.bold):
        parts.append(_curve(curve, lambda p: (across(change(p[0])), down(p[1])), log))
    return _svg(height, parts, f"Curves of {y_name} over {x_name}: {', '.join(dict.fromkeys(c.name for c in shown))}")


def _curve(curve: Curve, place: Place, dots: bool) -> Html:
    parts = []
    if curve.low and curve.high:
        band = [*map(place, curve.low), *map(place, reversed(curve.high))]
        text = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in band) + "z"
        parts.append(tag("path", d=text, fill=curve.colour, opacity=0.14))
    points = [place(point) for point in curve.points]
    parts.append(_path(points, curve.colour, 2.2 if curve.bold else 0.9, 1 if curve.bold else 0.4, curve.dashed))
    if dots or len(points) == 1:
        parts += [tag("circle", cx=_n(x), cy=_n(y), r=2.8, fill=curve.colour) for x, y in points]
    return join(parts)


def rounds(curves: Sequence[Sequence[Point]], name: str, paint: str) -> list[Curve]:
    """Every round thin, and their median bold where at least two go on."""
    thin = [Curve(name, curve, paint, bold=False) for curve in curves]
    by_x: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            by_x.setdefault(x, []).append(y)
    middle = [(x, median(ys)) for x, ys in sorted(by_x.items())]
    return [*thin, Curve(name, middle, paint)]


def heat(names: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], digits: int = 1,
         numbers: bool = True, start: float | None = None) -> Html:  # fmt: skip
    """A heat map: darker is larger; absent cells are dashes."""
    known = [value for row in values for value in row if value is not None]
    if not known:
        return tag("p", "No values yet.", class_="small")
    low = min(known) if start is None else start
    high = max(known)
    left = _label_width(names)
    width = (WIDTH - left - 6) / max(1, len(columns))
    parts = []
    every = max(1, math.ceil(max(len(_short(c, 8)) for c in columns) * 6.2 / width))
    for n, column in enumerate(columns):
        if n % every == 0:
            parts.append(_text(left + (n + 0.5) * width, 11, _short(column, 8), anchor="middle", fill=SOFT, size=10))
    for n, (name, row) in enumerate(zip(names, values, strict=True)):
        y = 16 + 22 * n
        parts.append(_text(left - 6, y + 14, _short(name, 20), anchor="end"))
        for k, value in enumerate(row):
            parts.append(
                _square(left + k * width, y, width, value, low, high, digits if numbers and width > 26 else None)
            )
    return _svg(20 + 22 * len(names), parts, "Heat map")


def _square(x: float, y: float, width: float, value: float | None, low: float, high: float, digits: int | None) -> Html:
    if value is None:
        return _text(x + width / 2, y + 14, "–", anchor="middle", fill="#a3adb8")
    share = (value - low) / (high - low) if high > low else 0.0
    box = tag(
        "rect", tag("title", f"{value:.4g}"), x=_n(x), y=_n(y), width=_n(width - 1), height=21, fill=_shade(share)
    )
    if digits is None:
        return box
    ink = "#fff" if share > 0.55 else INK
    return join([box, _text(x + width / 2 - 0.5, y + 14, f"{value:.{digits}f}", anchor="middle", fill=ink, size=10)])


def _shade(share: float) -> str:
    ends = ((238, 244, 251), (107, 160, 210), (13, 59, 110))
    low, high, part = (ends[0], ends[1], share * 2) if share < 0.5 else (ends[1], ends[2], share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def change_map(change: Mapping[str, Sequence[float | None]]) -> Html:
    """The papers' map: terms down, layers across, darker where the mean absolute change is larger."""
    layered = {term: list(values) for term, values in change.items() if len(values) > 1}
    outside = {term: values[0] for term, values in change.items() if len(values) == 1 and values[0] is not None}
    if not layered and not outside:
        return tag("p", "Nothing to map: no term has a recorded change.", class_="small")
    layers = max(map(len, layered.values()), default=1)
    names = [*layered, *outside]
    rows = [v + [None] * (layers - len(v)) for v in layered.values()]
    rows += [[value, *[None] * (layers - 1)] for value in outside.values()]
    top = max((v for row in rows for v in row if v is not None), default=0.0)
    scaled = [[None if v is None else (100 * v / top if top else 0.0) for v in row] for row in rows]
    drawing = heat(names, [str(layer) for layer in range(layers)], scaled, 0, start=0.0)
    return join([drawing, tag("p", f"100 is a mean absolute change of {top:.3g}; layers across.", class_="small")])


def scatter(points: Sequence[tuple[float, float, str]], x_name: str, y_name: str) -> Html:
    """Named points; names are numbers in the drawing and a list below it."""
    if not points:
        return tag("p", "No values yet.", class_="small")
    x_low, x_high = _reach([x for x, _, _ in points], zero=True)
    low, high = _reach([y for _, y, _ in points], zero=False)
    across, down = _scale(x_low, x_high, 40, WIDTH - 14), _scale(low, high, 168, 14)
    parts = [_shelf(down(tick), _number(tick)) for tick in _ticks(low, high, 4)]
    parts += [_text(across(t), 184, _number(t), anchor="middle", fill=SOFT) for t in _ticks(x_low, x_high, 4)]
    parts += [_text(190, 202, x_name, anchor="middle", fill=SOFT), _text(4, 8, y_name, fill=SOFT, size=10)]
    for n, (x, y, name) in enumerate(points):
        dot = tag("circle", tag("title", name), cx=_n(across(x)), cy=_n(down(y)), r=4, fill=colour(n), opacity=0.85)
        parts += [dot, _text(across(x) + 6, down(y) + 3, str(n + 1), size=9, fill=SOFT)]
    names = "; ".join(f"{n} {name}" for n, (_, _, name) in enumerate(points, 1))
    return join([_svg(208, parts, f"{y_name} against {x_name}"), tag("p", names, class_="small")])


# ---- pieces


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _reach(values: Sequence[float], zero: bool) -> tuple[float, float]:
    """The ends of an axis: a little beyond the values."""
    low, high = min(values), max(values)
    if zero:
        low = min(0.0, low)
    room = 0.08 * (high - low) or max(0.5, 0.05 * abs(high))
    return (low if zero else low - room), high + room


def _ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers between two ends."""
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= 0.7 * rough)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]


def _spaced(marks: Sequence[float], across: Scale, change: Callable[[float], float]) -> list[float]:
    kept: list[float] = []
    for mark in marks:
        if not kept or across(change(mark)) - across(change(kept[-1])) > 34:
            kept.append(mark)
    return kept


def _number(value: float) -> str:
    return f"{value / 1000:.3g}k" if abs(value) >= 1000 else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _label_width(names: Sequence[str]) -> float:
    return 14 + 6.3 * max((len(_short(name, 20)) for name in names), default=1)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: int = 11) -> Html:
    return tag("text", text, x=_n(x), y=_n(y), text_anchor=anchor, fill=fill, font_size=size)


def _path(points: Sequence[Point], stroke: str, width: float, opacity: float = 1, dashed: bool = False) -> Html:
    text = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    dashes = "4 3" if dashed else None
    faint = None if opacity == 1 else opacity
    return tag("path", d=text, fill="none", stroke=stroke, stroke_width=width, opacity=faint, stroke_dasharray=dashes)


def _grid_line(x: float, top: float, bottom: float, name: str) -> Html:
    line = tag("line", x1=_n(x), x2=_n(x), y1=_n(top), y2=_n(bottom), stroke=LINE)
    return join([line, _text(x, bottom + 13, name, anchor="middle", fill=SOFT, size=10)])


def _shelf(y: float, name: str) -> Html:
    line = tag("line", x1=40, x2=WIDTH - 10, y1=_n(y), y2=_n(y), stroke=LINE)
    return join([line, _text(36, y + 4, name, anchor="end", fill=SOFT, size=10)])


def _svg(height: float, parts: Sequence[Html], label: str) -> Html:
    font = "system-ui, Segoe UI, Roboto, sans-serif"
    box = f"0 0 {WIDTH} {_n(height)}"
    return tag("svg", join(parts), view_box=box, role="img", aria_label=label, font_family=font)
