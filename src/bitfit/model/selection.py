"""Which entries of which tensors train: the value, its set algebra, and the language that names it.

bias - b_q@0-5        terms and groups, layers, + - & and parentheses (& binds tighter)
re:".*query.*"        whole parameter names
random(all, 0.1%)     samples; rowcol(all, 0.09%) takes whole rows or columns
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import SelectionError, suggest
from .anatomy import TERMS, Anatomy, Site

Indices = npt.NDArray[np.int64]


# ---- the value -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Selection:
    """An immutable set of entries: per tensor either all of it (None) or sorted flat indices."""

    entries: Mapping[str, Indices | None]
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted(self.entries.keys() - self.shapes.keys()):
            raise SelectionError(f'no parameter "{unknown[0]}" in this model.')
        named = [name for name in self.shapes if name in self and self.size(name)]
        held = {name: _canonical(name, self.entries[name], self.size(name)) for name in named}
        kept = {name: indices for name, indices in held.items() if indices is None or indices.size}
        object.__setattr__(self, "entries", MappingProxyType(kept))
        object.__setattr__(self, "shapes", MappingProxyType(dict(self.shapes)))

    def size(self, name: str) -> int:
        """How many entries a tensor of the model has, selected or not."""
        return math.prod(self.shapes[name])

    @property
    def count(self) -> int:
        """How many entries are selected."""
        return sum(self.size(name) if held is None else held.size for name, held in self.entries.items())

    @property
    def matrix_share(self) -> float:
        """How much of the model's matrices is selected; 1 as soon as one of them is selected whole."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        held = [self.entries[name] for name in matrices if name in self]
        sizes = [indices.size for indices in held if indices is not None]
        return 1.0 if len(sizes) < len(held) else sum(sizes) / max(1, sum(map(self.size, matrices)))

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        same = self.shapes == other.shapes and self.entries.keys() == other.entries.keys()
        return same and all(_equal(held, other.entries[name]) for name, held in self.entries.items())

    def __add__(self, other: Selection) -> Selection:
        merged = dict(self.entries)
        for name, theirs in other.entries.items():
            merged[name] = _union(merged[name], theirs) if name in merged else theirs
        return self._with(other, merged)

    def __and__(self, other: Selection) -> Selection:
        return self._with(other, {n: _common(held, other.entries[n]) for n, held in self.entries.items() if n in other})

    def __sub__(self, other: Selection) -> Selection:
        kept = {n: held for n, held in self.entries.items() if n not in other}
        cut = {n: _without(self.entries[n], other.entries[n], self.size(n)) for n in self.entries if n in other}
        return self._with(other, kept | cut)

    def _with(self, other: Selection, entries: Mapping[str, Indices | None]) -> Selection:
        if self.shapes != other.shapes:
            raise SelectionError("selections of different models cannot be combined: their parameters differ.")
        return Selection(entries, self.shapes, tuple(dict.fromkeys(self.notes + other.notes)))


def _canonical(name: str, held: Indices | None, size: int) -> Indices | None:
    """Sorted, unique, read-only indices of our own, or None where they are the whole tensor."""
    if held is None:
        return None
    indices = np.array(held, dtype=np.int64)
    if (np.diff(indices) <= 0).any():
        indices = np.unique(indices)
    if indices.size and (indices[0] < 0 or indices[-1] >= size):
        raise SelectionError(f'an index lies outside "{name}", which has {size:,} entries.')
    indices.flags.writeable = False
    return None if indices.size == size else indices


def _equal(a: Indices | None, b: Indices | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)


def _union(a: Indices | None, b: Indices | None) -> Indices | None:
    return None if a is None or b is None else np.union1d(a, b)


def _common(a: Indices | None, b: Indices | None) -> Indices | None:
    if a is None or b is None:
        return b if a is None else a
    return np.intersect1d(a, b, assume_unique=True)


def _without(a: Indices | None, b: Indices | None, size: int) -> Indices:
    if b is None:
        return np.empty(0, np.int64)
    if a is not None:
        return np.setdiff1d(a, b, assume_unique=True)
    rest = np.ones(size, bool)
    rest[b] = False
    return np.flatnonzero(rest)


# ---- sites and entries -----------------------------------------------------------------------------------------


def count_by_term(anatomy: Anatomy, selection: Selection) -> dict[str, int]:
    """How many entries of each term the model offers are selected, in the papers' order."""
    if anatomy.shapes != selection.shapes:
        raise SelectionError("this selection belongs to another model: its parameters differ.")
    counts = dict.fromkeys(anatomy.terms, 0)
    for site in anatomy.sites:
        counts[site.term] += overlap(site, selection)
    return counts


def overlap(site: Site, selection: Selection) -> int:
    """How many entries of a site are selected."""
    if site.name not in selection:
        return 0
    held = selection.entries[site.name]
    if held is None or site.whole:
        return site.size if held is None else held.size
    span = site.span(site.axis)
    along = held // math.prod(site.shape[site.axis + 1 :]) % site.shape[site.axis]
    return int(np.count_nonzero((along >= span.start) & (along < span.stop)))


def _flat(site: Site) -> Indices:
    """The flat indices of a site in its tensor."""
    spans = [site.span(axis) for axis in range(len(site.shape))]
    inside = tuple(slice(span.start, span.stop) for span in spans)
    return np.arange(math.prod(site.shape), dtype=np.int64).reshape(site.shape)[inside].ravel()


def _of_sites(anatomy: Anatomy, wanted: Callable[[Site], bool]) -> Selection:
    groups: dict[str, list[Site]] = {}
    for site in filter(wanted, anatomy.sites):
        groups.setdefault(site.name, []).append(site)
    return Selection({name: _joined(sites) for name, sites in groups.items()}, anatomy.shapes)


def _joined(sites: list[Site]) -> Indices | None:
    # Sites of a tensor are disjoint, so equal sizes mean equal sets and nothing needs to be materialised.
    if sum(site.size for site in sites) == math.prod(sites[0].shape):
        return None
    return np.concatenate([_flat(site) for site in sites])


# ---- samples ---------------------------------------------------------------------------------------------------


def _random(anatomy: Anatomy, operand: Selection, asked: int, rng: np.random.Generator) -> Selection:
    """A uniform sample of the operand's entries, without replacement."""
    if not asked:
        return Selection({}, anatomy.shapes)
    # Sorted by name, so that the same seed draws the same entries whatever order a model lists its parameters in.
    held = sorted(operand.entries.items())
    ends = np.cumsum([operand.size(name) if indices is None else indices.size for name, indices in held])
    drawn = np.sort(rng.choice(operand.count, asked, replace=False, shuffle=False))
    places = _per_run(drawn, ends)
    chosen = {n: at if indices is None else indices[at] for (n, indices), at in zip(held, places, strict=True)}
    return Selection(chosen, anatomy.shapes)


def _per_run(drawn: Indices, ends: Indices) -> list[Indices]:
    """Sorted positions on a line of consecutive runs, split into the positions within each run."""
    parts = np.split(drawn, np.searchsorted(drawn, ends[:-1]))
    return [part - start for part, start in zip(parts, [0, *ends[:-1]], strict=True)]


@dataclass(frozen=True, slots=True)
class _Units:
    """The rows, or the columns, of one matrix."""

    site: Site
    by_row: bool

    @property
    def number(self) -> int:
        return len(self.site.span(0 if self.by_row else 1))

    @property
    def length(self) -> int:
        return len(self.site.span(1 if self.by_row else 0))

    def flat(self, units: Indices) -> Indices:
        """The flat indices of some of the units."""
        rows, columns = (np.array(self.site.span(axis), np.int64) for axis in (0, 1))
        rows, columns = (rows[units], columns) if self.by_row else (rows, columns[units])
        return (rows[:, None] * self.site.shape[1] + columns).ravel()


def _rowcol(anatomy: Anatomy, operand: Selection, asked: int, rng: np.random.Generator) -> Selection:
    """Whole rows or columns of the operand's matrices, until no further one fits into what was asked."""
    matrices = sorted((s for s in anatomy.sites if _is_matrix_of(s, operand)), key=lambda s: (s.name, s.start))
    if not matrices:
        raise SelectionError("no whole matrix to take rows or columns of")
    # One orientation per matrix: a row and a column of the same matrix would share an entry.
    kinds = [_Units(site, bool(coin)) for site, coin in zip(matrices, rng.integers(2, size=len(matrices)), strict=True)]
    numbers = [units.number for units in kinds]
    lengths = np.repeat([units.length for units in kinds], numbers)
    order = rng.permutation(lengths.size)
    taken = np.sort(order[_fitting(lengths[order], asked)])
    if not taken.size:
        raise SelectionError(f"{asked:,} entries are less than the smallest row or column drawn, of {lengths.min():,},")
    return _of_units(anatomy, list(zip(kinds, _per_run(taken, np.cumsum(numbers)), strict=True)))


def _is_matrix_of(site: Site, operand: Selection) -> bool:
    return len(site.shape) == 2 and site.size > 0 and overlap(site, operand) == site.size


def _fitting(lengths: Indices, room: int) -> list[int]:
    """The positions taken when each length that still fits is taken in turn."""
    taken = []
    smallest = int(lengths.min())
    for position, length in enumerate(lengths.tolist()):
        if room < smallest:
            break
        if length <= room:
            taken.append(position)
            room -= length
    return taken


def _of_units(anatomy: Anatomy, chosen: list[tuple[_Units, Indices]]) -> Selection:
    flat: dict[str, list[Indices]] = {}
    for units, which in chosen:
        flat.setdefault(units.site.name, []).append(units.flat(which))
    rows = sum(which.size for units, which in chosen if units.by_row)
    columns = sum(which.size for units, which in chosen if not units.by_row)
    entries = {name: np.concatenate(parts) for name, parts in flat.items()}
    return Selection(entries, anatomy.shapes, (f"{rows:,} rows and {columns:,} columns",))


# ---- the language: meaning -------------------------------------------------------------------------------------

_GROUPS: Mapping[str, Callable[[Anatomy, Site], bool]] = {
    "bias": lambda anatomy, site: site.term.startswith("b_"),
    "gamma": lambda anatomy, site: site.term.startswith("g_"),
    "layernorm": lambda anatomy, site: anatomy.in_layernorm(site),
    "all": lambda anatomy, site: True,
    "none": lambda anatomy, site: False,
}
_SAMPLERS = {"random": _random, "rowcol": _rowcol}
_WORDS = (*TERMS, *_GROUPS, *_SAMPLERS)
_OPERATORS: Mapping[str, Callable[[Selection, Selection], Selection]] = {
    "+": Selection.__add__,
    "-": Selection.__sub__,
    "&": Selection.__and__,
}


def _error(text: str, at: int, what: str, more: str = "") -> SelectionError:
    """The one line that points at a character of the text, counted from 1."""
    line = re.sub(r"\s", " ", text)
    return SelectionError(f"{line}: {what} at character {at + 1}.{more}")


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a parsed text is read against."""

    anatomy: Anatomy
    text: str
    seed: int


class _Node(Protocol):
    def select(self, scene: _Scene) -> Selection: ...


@dataclass(frozen=True, slots=True)
class _Term:
    word: str
    at: int

    def select(self, scene: _Scene) -> Selection:
        if self.word not in scene.anatomy.terms:
            offered = f" It offers: {', '.join(scene.anatomy.terms)}."
            raise _error(scene.text, self.at, f'this model lacks the term "{self.word}"', offered)
        return _of_sites(scene.anatomy, lambda site: site.term == self.word)


@dataclass(frozen=True, slots=True)
class _Group:
    word: str

    def select(self, scene: _Scene) -> Selection:
        belongs = _GROUPS[self.word]
        return _of_sites(scene.anatomy, lambda site: belongs(scene.anatomy, site))


@dataclass(frozen=True, slots=True)
class _Pattern:
    pattern: re.Pattern[str]
    at: int

    def select(self, scene: _Scene) -> Selection:
        names = {name for name in scene.anatomy.shapes if self.pattern.fullmatch(name)}
        if not names:
            example = f' A name reads like "{next(iter(scene.anatomy.shapes), "")}".'
            raise _error(scene.text, self.at, "no whole parameter name matches the pattern", example)
        return _of_sites(scene.anatomy, lambda site: site.name in names)


@dataclass(frozen=True, slots=True)
class _Layers:
    node: _Node
    first: int
    last: int
    at: int

    def select(self, scene: _Scene) -> Selection:
        layers = range(scene.anatomy.layers)
        # "last4" is kept as -4 .. -1, since only the model knows where it begins.
        first, last = (n + len(layers) if n < 0 else n for n in (self.first, self.last))
        if first not in layers or last not in layers:
            raise _error(scene.text, self.at, "this model lacks the layers asked for", f" {_extent(len(layers))}")
        return self.node.select(scene) & _of_sites(scene.anatomy, lambda site: site.layer in range(first, last + 1))


def _extent(layers: int) -> str:
    if layers < 2:
        return "It has 1 layer: 0." if layers else "It has no layers known by name."
    return f"It has {layers} layers: 0 to {layers - 1}."


@dataclass(frozen=True, slots=True)
class _Chain:
    """Operands joined from left to right; flat, so that a long text is not a deep tree."""

    first: _Node
    rest: tuple[tuple[str, _Node], ...]

    def select(self, scene: _Scene) -> Selection:
        result = self.first.select(scene)
        for sign, node in self.rest:
            result = _OPERATORS[sign](result, node.select(scene))
        return result


@dataclass(frozen=True, slots=True)
class _Sample:
    sampler: str
    node: _Node
    amount: str
    seed: int | None
    ordinal: int
    at: int
    source: str

    def select(self, scene: _Scene) -> Selection:
        operand = self.node.select(scene)
        asked = _asked(self.amount, operand.count)
        if asked > operand.count:
            raise _error(scene.text, self.at, f"cannot take {asked:,} of {operand.count:,} entries")
        # The ordinal makes two samples of one text differ.
        rng = np.random.default_rng([scene.seed if self.seed is None else self.seed, self.ordinal])
        try:
            sample = _SAMPLERS[self.sampler](scene.anatomy, operand, asked, rng)
        except SelectionError as reason:
            raise _error(scene.text, self.at, str(reason)) from None
        return Selection(sample.entries, sample.shapes, operand.notes + self._notes(sample, asked))

    def _notes(self, sample: Selection, asked: int) -> tuple[str, ...]:
        return tuple(f"{self.source} took {sample.count:,} entries of {asked:,} asked: {note}" for note in sample.notes)


def _asked(amount: str, total: int) -> int:
    """An amount as a count, percentages rounded to the nearest entry."""
    if not amount.endswith("%"):
        return int(amount)
    return math.floor(Fraction(amount.rstrip("% ")) * total / 100 + Fraction(1, 2))


# ---- the language: form ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<layers>@\s*(?:last[0-9]{1,9}|[0-9]{1,9}(?:-[0-9]{1,9})?))
      | (?P<number>(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[ ]*%)?)
      | (?P<sign>[-+&(),=])""",
    re.VERBOSE,
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("re:", at):
            end = _pattern_end(text, at + 3)
            yield _Token("pattern", text[at:end], at)
            at = end
        elif match := _TOKEN.match(text, at):
            yield _Token(match.lastgroup or "", match[0], at)
            at = match.end()
        else:
            hint = " Layers read like @3, @0-5 or @last4." if text[at] == "@" else ""
            raise _error(text, at, f'unexpected "{text[at]}"', hint)
    yield _Token("end", "", len(text))


def _pattern_end(text: str, at: int) -> int:
    """Where the pattern that begins here ends: at its quote, or else before a space, `@`, `,` or a closing `)`."""
    if text.startswith('"', at):
        if match := _QUOTED.match(text, at):
            return match.end()
        raise _error(text, at, "a quote is opened and never closed")
    end, depth = at, 0
    while end < len(text) and not text[end].isspace() and text[end] != "@":
        if depth <= 0 and text[end] in "),":
            break
        depth += (text[end] in "([{") - (text[end] in ")]}")
        end += 2 if text[end] == "\\" else 1
    return min(end, len(text))


@dataclass(frozen=True, slots=True)
class Init:
    """What the entries of a selection start from: their base values, zero, or a fresh draw."""

    kind: str  # "keep", "zero" or "reinit"
    selection: str = "none"


class _Parser:
    """Reads one text by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.next = 0
        self.depth = 0
        self.seeds: list[int | None] = []

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def take(self) -> _Token:
        self.next += 1
        return self.tokens[self.next - 1]

    def sees(self, *signs: str) -> bool:
        return self.token.kind == "sign" and self.token.text in signs

    def expect(self, sign: str) -> _Token:
        if not self.sees(sign):
            raise self.unexpected(f'"{sign}"')
        return self.take()

    def unexpected(self, wanted: str) -> SelectionError:
        found = f'"{self.token.text}"' if self.token.kind != "end" else "the end"
        return _error(self.text, self.token.at, f"expected {wanted} but found {found}")

    def whole(self) -> _Node:
        """The whole text as one expression."""
        if self.token.kind == "end":
            raise SelectionError('the selection is empty; write "none" to select nothing.')
        node = self.expression()
        self.finish("one of + - & or the end")
        return node

    def finish(self, wanted: str) -> None:
        if self.token.kind != "end":
            raise self.unexpected(wanted)

    def expression(self) -> _Node:
        return self.chain(self.product, "+", "-")

    def product(self) -> _Node:
        return self.chain(self.operand, "&")

    def chain(self, part: Callable[[], _Node], *signs: str) -> _Node:
        first, rest = part(), []
        while self.sees(*signs):
            sign = self.take().text
            rest.append((sign, part()))
        return _Chain(first, tuple(rest)) if rest else first

    def operand(self) -> _Node:
        sampled = self.token.text in _SAMPLERS
        node = self.primary()
        while self.token.kind == "layers":
            if sampled:
                raise _error(self.text, self.token.at, "layers go inside the sample, not behind it,")
            node = self.layers(node)
        return node

    def layers(self, node: _Node) -> _Node:
        token = self.take()
        first, _, last = token.text[1:].strip().partition("-")
        if first.startswith("last"):
            numbers = -int(first.removeprefix("last")), -1
        else:
            numbers = int(first), int(last or first)
        if numbers[0] > numbers[1]:
            raise _error(self.text, token.at, "the layers are empty", " They read like @3, @0-5 or @last4.")
        return _Layers(node, *numbers, token.at)

    def primary(self) -> _Node:
        if self.token.kind == "word":
            return self.word()
        if self.token.kind == "pattern":
            return self.pattern()
        if not self.sees("("):
            raise self.unexpected("a term, a group or (")
        return self.parenthesised()

    def parenthesised(self) -> _Node:
        self.expect("(")
        node = self.nested()
        self.expect(")")
        return node

    def nested(self) -> _Node:
        if self.depth == _DEEPEST:
            raise _error(self.text, self.token.at, f"more than {_DEEPEST} nested parentheses")
        self.depth += 1
        node = self.expression()
        self.depth -= 1
        return node

    def word(self) -> _Node:
        token = self.take()
        if token.text in TERMS:
            return _Term(token.text, token.at)
        if token.text in _GROUPS:
            return _Group(token.text)
        if token.text in _SAMPLERS:
            return self.sample(token)
        raise _unknown(self.text, token, "term", _WORDS)

    def pattern(self) -> _Node:
        token = self.take()
        body = token.text.removeprefix("re:")
        try:
            return _Pattern(re.compile(body[1:-1] if body.startswith('"') else body), token.at)
        except (re.error, OverflowError, RecursionError) as reason:
            raise _error(self.text, token.at, f"the pattern is not a regular expression ({reason})") from None

    def sample(self, name: _Token) -> _Node:
        ordinal = len(self.seeds)
        self.seeds.append(None)
        self.expect("(")
        node = self.nested()
        self.expect(",")
        amount = self.amount()
        self.seeds[ordinal] = seed = self.seed()
        end = self.expect(")").at + 1
        return _Sample(name.text, node, amount, seed, ordinal, name.at, self.text[name.at : end])

    def amount(self) -> str:
        if self.token.kind != "number" or not (self.token.text.isdigit() or self.token.text.endswith("%")):
            raise self.unexpected("a whole number or a percentage")
        return self.take().text

    def seed(self) -> int | None:
        if not self.sees(","):
            return None
        self.take()
        if self.token.text != "seed":
            raise self.unexpected("seed=")
        self.take()
        self.expect("=")
        if not self.token.text.isdigit():
            raise self.unexpected("a whole number")
        return int(self.take().text)

    def inits(self) -> tuple[Init, ...]:
        """The whole text as start values."""
        found = [self.init()]
        while self.sees("+"):
            self.take()
            found.append(self.init())
        self.finish("+ or the end")
        return tuple(found)

    def init(self) -> Init:
        token = self.take()
        if token.text == "keep":
            return Init("keep")
        if token.text not in ("zero", "reinit"):
            raise _unknown(self.text, token, "start value", ("keep", "zero", "reinit"))
        start = self.expect("(").at + 1
        self.nested()
        return Init(token.text, self.text[start : self.expect(")").at].strip())


def _unknown(text: str, token: _Token, what: str, known: Sequence[str]) -> SelectionError:
    by_lower_case = {word.lower(): word for word in known}
    return _error(
        text, token.at, f'no {what} "{token.text}"', suggest(by_lower_case.get(token.text.lower(), token.text), known)
    )


# ---- what others call ------------------------------------------------------------------------------------------


def select(anatomy: Anatomy, text: str, seed: int = 0) -> Selection:
    """The entries of a model that a text of the selection language names."""
    if seed < 0:
        raise SelectionError(f"the seed of a selection is {seed}; it must not be negative.")
    return _Parser(text).whole().select(_Scene(anatomy, text, seed))


def check(text: str) -> None:
    """Refuse a text that no model could understand."""
    _Parser(text).whole()


def parse_init(text: str) -> tuple[Init, ...]:
    """The start values that a text like `zero(b_q) + reinit(W_q)` asks for, in its order."""
    return _Parser(text).inits()
