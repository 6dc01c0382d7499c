"""The change map: complete, readable at any width, with or without colour, and the same bytes every time."""

from __future__ import annotations

import io
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console
from rich.text import Text

from bitfit.report.changemap import svg, terminal

TERMS = ("b_k", "b_q", "b_v", "b_m1", "b_LN1", "b_m2", "b_m3", "b_LN2")
OUTSIDE = ("b_emb", "b_pool")
WIDTHS = (20, 60, 80, 200)


def made_up(layers: int, scale: float = 0.01) -> dict[str, list[float | None]]:
    change: dict[str, list[float | None]] = {
        term: [scale * row * (layer + 1) / layers for layer in range(layers)] for row, term in enumerate(TERMS)
    }
    change["b_v"][0] = None
    return change | {"b_emb": [scale], "b_pool": [2 * scale]}


def printed(change: dict[str, list[float | None]], width: int, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(terminal(change, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def texts(page: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(page).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("layers", [2, 12, 24, 48])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_term_has_a_line_within_the_width(width: int, layers: int) -> None:
    lines = printed(made_up(layers), width).splitlines()
    starts = [line.split(" ")[0] for line in lines]
    assert [start for start in starts if start in TERMS][: len(TERMS)] == list(TERMS)
    assert [start for start in starts if start in OUTSIDE] == list(OUTSIDE)
    assert max(map(len, lines)) <= width


def test_numbers_are_written_where_they_fit() -> None:
    assert "b_LN2   0.58 1.17 1.75 2.33 2.92 3.50 4.08 4.67 5.25 5.83 6.42 7.00" in printed(made_up(12), 80)
    assert "in units of 0.01" in printed(made_up(12), 80)


def test_the_largest_change_is_named() -> None:
    assert "largest: 0.07 in b_LN2, layer 11" in printed(made_up(12), 80)


def test_narrow_maps_show_shades() -> None:
    lines = printed(made_up(24), 60).splitlines()
    rows = {line.split(" ")[0]: line for line in lines}
    assert rows["b_LN2"].endswith("██") and "░" in rows["b_LN2"]
    assert not set("░▒▓█") & set(rows["b_k"])
    assert "·" in rows["b_v"]
    assert rows["layer"].split()[1:] == ["0", "5", "10", "15", "20"]
    assert rows["layer"].index("5") - rows["layer"].index("0") == 5 * 2


def test_a_map_wider_than_the_terminal_continues_below() -> None:
    lines = printed(made_up(48), 40).splitlines()
    shades = "".join(line.removeprefix("b_LN2").strip() for line in lines if line.startswith("b_LN2"))
    assert len(shades) == 48


@pytest.mark.parametrize("width", WIDTHS)
def test_colour_adds_to_the_text_and_changes_none_of_it(width: int) -> None:
    coloured = printed(made_up(12), width, colour=True)
    assert "48;2;8;48;107" in coloured
    assert Text.from_ansi(coloured).plain.split() == printed(made_up(12), width).split()


@pytest.mark.parametrize("top", [9.94, 9.96, 9.996, 0.09996, 1e-30, 1e30])
def test_the_unit_leaves_one_digit_before_the_point(top: float) -> None:
    for width in (20, 80):
        row = printed({"b_q": [top, top, top]}, width).splitlines()[-1]
        assert len(row.split()) == 4
        assert all(1 <= float(cell) < 10 for cell in row.split()[1:])


def test_a_model_of_one_layer_keeps_its_terms_in_the_map() -> None:
    lines = printed({"b_q": [0.1], "b_pool": [0.2]}, 80).splitlines()
    starts = [line.split(" ")[0] for line in lines]
    assert starts.index("b_q") < starts.index("outside") < starts.index("b_pool")


@pytest.mark.parametrize("change", [{}, {"b_q": []}, {"b_q": [None, None]}, {"b_q": [float("nan")]}])
def test_an_empty_change_is_a_sentence(change: dict[str, list[float | None]]) -> None:
    assert printed(change, 80).strip() == "Nothing to map: no term has a recorded change."
    assert "Nothing to map: no term has a recorded change." in texts(svg(change, "empty"))


def test_no_change_at_all_is_drawn() -> None:
    change: dict[str, list[float | None]] = {"b_q": [0.0, 0.0], "b_pool": [0.0]}
    assert "nothing changed" in printed(change, 80)
    assert "b_q" in texts(svg(change, "zeros"))


@pytest.mark.parametrize("layers", [1, 2, 12, 24, 48])
def test_the_svg_names_every_term_and_the_units(layers: int) -> None:
    found = texts(svg(made_up(layers), "Change (RTE)"))
    assert {*TERMS, *OUTSIDE, "Change (RTE)", "layer", "0", "mean absolute change"} <= set(found)
    order = [text for text in found if text in TERMS + OUTSIDE]
    assert order == [*TERMS, *OUTSIDE]


def test_the_svg_is_the_same_every_time_whatever_the_style() -> None:
    import matplotlib

    first = svg(made_up(12), "again")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
        assert svg(made_up(12), "again") == first
        assert matplotlib.rcParams["font.size"] == 20


def test_the_svg_stands_alone() -> None:
    page = svg(made_up(12), "alone")
    assert page.startswith("<svg")
    assert "<image" not in page and "<!DOCTYPE" not in page and "<metadata" not in page


@pytest.mark.parametrize(
    "title",
    ["<script>alert(1)</script>", "a & b", '"]]>', "$\\frac{", "$x$", "映画のレビュー", "bell \x07 and \x00 nul"],
)
def test_hostile_titles_and_terms_come_out_as_text(title: str) -> None:
    page = svg({title: [0.1, 0.2]}, title)
    shown = title.replace("\x07", "?").replace("\x00", "?")
    assert texts(page).count(shown) == 2
    assert "<script" not in page


def test_a_long_title_is_wrapped() -> None:
    found = texts(svg(made_up(2), "word " * 60))
    assert max(map(len, found)) < 60 and sum(text.count("word") for text in found) == 60


def test_the_figure_grows_with_the_map() -> None:
    def size(layers: int, terms: int) -> list[float]:
        change = {f"b_{row}": [0.1] * layers for row in range(terms)}
        return [float(edge) for edge in ET.fromstring(svg(change, "size")).attrib["viewBox"].split()[2:]]

    assert size(24, 8)[0] > size(12, 8)[0]
    assert size(12, 16)[1] > size(12, 8)[1]


def test_importing_the_map_imports_no_matplotlib_and_no_torch() -> None:
    code = "import sys, bitfit.report.changemap; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
