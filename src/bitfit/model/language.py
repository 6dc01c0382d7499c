"""The selection language: texts that name a selection, start values (--init) and grafts (--inject).

bias - b_q@0-5        terms and groups, layers, + - & and parentheses (& binds tighter)
re:".*query.*"        parameter names that match a regular expression from start to end
random(all, 0.1%)     samples by a strategy: random, each (of every tensor), rowcol (whole rows or columns), magnitude
                      (largest values), ...; as many as another selection has: random(all - W_emb, count(bias))
diff_pruning(all, 1%) entries that training determines; cannot be combined with other terms
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from ..errors import SelectionError, suggest
from .anatomy import TERMS, Anatomy, Site
from .grafts import GRAFTS, graft_terms, injects
from .selection import Selection, of_sites
from .strategies import LEARNED, STRATEGIES, Request, WeightsNeeded

_GROUPS: Mapping[str, Callable[[Anatomy, Site], bool]] = {
    "bias": lambda anatomy, site: site.term.startswith("b_"),
    "gamma": lambda anatomy, site: site.term.startswith("g_"),
    "layernorm": lambda anatomy, site: anatomy.in_layernorm(site),
    "injected": lambda anatomy, site: site.graft is not None,
    "all": lambda anatomy, site: True,
    "none": lambda anatomy, site: False,
}
COUNT = "count"
_OPERATORS: Mapping[str, Callable[[Selection, Selection], Selection]] = {
    "+": Selection.__add__,
    "-": Selection.__sub__,
    "&": Selection.__and__,
}


def _error(text: str, at: int, what: str, more: str = "") -> SelectionError:
    """An error in one line that points at a character of the text, counted from 1."""
    line = re.sub(r"\s", " ", text)
    return SelectionError(f"{line}: {what} at character {at + 1}.{more}")


def _added_by(word: str) -> str:
    """A hint for a term that only a graft has."""
    for name, graft in GRAFTS.items():
        if word in graft.terms:
            return f' It is a term of {name}: --inject adds it, e.g. --inject "{graft.example}".'
    return ""


@dataclass(frozen=True, slots=True)
class _Context:
    """What a parsed text is evaluated on."""

    anatomy: Anatomy
    text: str
    seed: int


class _Node(Protocol):
    def select(self, context: _Context) -> Selection: ...


@dataclass(frozen=True, slots=True)
class _Term:
    word: str
    at: int

    def select(self, context: _Context) -> Selection:
        if self.word not in context.anatomy.terms:
            offered = f" It offers: {', '.join(context.anatomy.terms)}.{_added_by(self.word)}"
            raise _error(context.text, self.at, f'this model does not have the term "{self.word}"', offered)
        return of_sites(context.anatomy, lambda site: site.term == self.word)


@dataclass(frozen=True, slots=True)
class _Group:
    word: str

    def select(self, context: _Context) -> Selection:
        belongs = _GROUPS[self.word]
        return of_sites(context.anatomy, lambda site: belongs(context.anatomy, site))


@dataclass(frozen=True, slots=True)
class _Pattern:
    pattern: re.Pattern[str]
    at: int

    def select(self, context: _Context) -> Selection:
        names = {name for name in context.anatomy.shapes if self.pattern.fullmatch(name)}
        if not names:
            example = f' It must match an entire name, such as "{next(iter(context.anatomy.shapes), "")}".'
            raise _error(context.text, self.at, "the pattern matches no parameter name", example)
        return of_sites(context.anatomy, lambda site: site.name in names)


@dataclass(frozen=True, slots=True)
class _Layers:
    node: _Node
    first: int
    last: int
    at: int

    def select(self, context: _Context) -> Selection:
        layers = range(context.anatomy.layers)
        # "last4" is parsed as -4 .. -1, since the number of layers is known only here.
        first, last = (n + len(layers) if n < 0 else n for n in (self.first, self.last))
        if first not in layers or last not in layers:
            raise _error(context.text, self.at, "this model does not have these layers", _layers_known(len(layers)))
        wanted = range(first, last + 1)
        return self.node.select(context) & of_sites(context.anatomy, lambda site: site.layer in wanted)


def _layers_known(layers: int) -> str:
    if layers < 2:
        return " It has 1 layer: 0." if layers else " bitfit does not know the layers of this architecture."
    return f" It has {layers} layers: 0 to {layers - 1}."


@dataclass(frozen=True, slots=True)
class _Chain:
    """Operands joined from left to right; flat, so that a long text is not a deep tree."""

    first: _Node
    rest: tuple[tuple[str, _Node], ...]

    def select(self, context: _Context) -> Selection:
        result = self.first.select(context)
        for sign, node in self.rest:
            result = _OPERATORS[sign](result, node.select(context))
        return result


@dataclass(frozen=True, slots=True)
class _Sample:
    strategy: str
    node: _Node
    amount: str | _Node  # a number, a percentage, or a selection that has as many entries
    seed: int | None
    ordinal: int
    at: int
    source: str

    def select(self, context: _Context) -> Selection:
        operand = self.node.select(context)
        count = self._count(operand.count, context)
        if count > operand.count:
            raise _error(context.text, self.at, f"cannot take {count:,} of {operand.count:,} entries")
        seed = context.seed if self.seed is None else self.seed
        rng = np.random.default_rng([seed, self.ordinal])  # the ordinal makes two samples of one text differ
        try:
            sample = STRATEGIES[self.strategy](Request(context.anatomy, operand, count, rng))
        except WeightsNeeded as reason:
            raise WeightsNeeded(f"{context.text}: {reason}") from None
        except SelectionError as reason:
            raise _error(context.text, self.at, str(reason)) from None
        notes = operand.notes + self._notes(sample, count)
        return Selection(sample.entries, sample.shapes, notes, operand.injected, sample.learned)

    def _count(self, total: int, context: _Context) -> int:
        """The number of entries to draw."""
        if isinstance(self.amount, str):
            return _as_count(self.amount, total)
        return self.amount.select(context).count

    def _notes(self, sample: Selection, count: int) -> tuple[str, ...]:
        taken = f"{self.source} took {sample.count:,} of {count:,} requested entries"
        return tuple(f"{taken}: {note}" for note in sample.notes)


def _as_count(amount: str, total: int) -> int:
    """An amount as a count, percentages rounded to the nearest entry."""
    if not amount.endswith("%"):
        return int(amount)
    return math.floor(Fraction(amount.rstrip("% ")) * total / 100 + Fraction(1, 2))


# ---- parsing ---------------------------------------------------------------------------------------------------

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
            hint = " Write layers as @3, @0-5 or @last4." if text[at] == "@" else ""
            raise _error(text, at, f'unexpected "{text[at]}"', hint)
    yield _Token("end", "", len(text))


def _pattern_end(text: str, at: int) -> int:
    """The end of the pattern that starts here: its closing quote, or else before a space, `@`, `,` or a closing `)`."""
    if text.startswith('"', at):
        if match := _QUOTED.match(text, at):
            return match.end()
        raise _error(text, at, "a quote is opened and never closed")
    end = at
    depth = 0
    while end < len(text) and not text[end].isspace() and text[end] != "@":
        if depth <= 0 and text[end] in "),":
            break
        depth += (text[end] in "([{") - (text[end] in ")]}")
        end += 2 if text[end] == "\\" else 1
    return min(end, len(text))


@dataclass(frozen=True, slots=True)
class Init:
    """The start values of a selection: those of the base, zeros, or a fresh draw."""

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
        self.learned: _Token | None = None  # a strategy whose entries training finds

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
        actual = f'"{self.token.text}"' if self.token.kind != "end" else "the end"
        return _error(self.text, self.token.at, f"expected {wanted} but found {actual}")

    def selection(self) -> _Node:
        """Parse the text as a selection."""
        if self.token.kind == "end":
            raise SelectionError('the selection is empty; write "none" to select nothing.')
        node = self.expression()
        self.finish("one of + - & or the end")
        if not isinstance(node, _Sample) or node.strategy not in LEARNED:
            self.refuse_learned("it cannot be combined with other terms")
        return node

    def refuse_learned(self, why: str) -> None:
        """Raise SelectionError if the text has a strategy whose entries training finds."""
        if self.learned is not None:
            raise _error(self.text, self.learned.at, f"{self.learned.text} learns its entries in training: {why}")

    def finish(self, wanted: str) -> None:
        if self.token.kind != "end":
            raise self.unexpected(wanted)

    def expression(self) -> _Node:
        return self.chain(self.product, "+", "-")

    def product(self) -> _Node:
        return self.chain(self.operand, "&")

    def chain(self, parse_operand: Callable[[], _Node], *signs: str) -> _Node:
        first = parse_operand()
        rest = []
        while self.sees(*signs):
            sign = self.take().text
            rest.append((sign, parse_operand()))
        return _Chain(first, tuple(rest)) if rest else first

    def operand(self) -> _Node:
        parenthesised = self.sees("(")
        node = self.primary()
        while self.token.kind == "layers":
            if isinstance(node, _Sample) and not parenthesised:
                hint = f" Write them inside: {node.strategy}(bias@2, 3)."
                raise _error(self.text, self.token.at, "layers after a sample", hint)
            node = self.layers(node)
        return node

    def layers(self, node: _Node) -> _Node:
        token = self.take()
        first, _, last = token.text[1:].strip().partition("-")
        if first.startswith("last"):
            lowest, highest = -int(first.removeprefix("last")), -1
        else:
            lowest, highest = int(first), int(last or first)
        if lowest > highest:
            raise _error(self.text, token.at, "the range of layers is empty", " Write layers as @3, @0-5 or @last4.")
        return _Layers(node, lowest, highest, token.at)

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
        if token.text in STRATEGIES:
            return self.sample(token)
        if token.text in graft_terms():
            return _Term(token.text, token.at)
        raise _unknown(self.text, token, "term", (*TERMS, *_GROUPS, *STRATEGIES))

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
        self.refuse_learned("it cannot be combined with other terms")
        if name.text in LEARNED:
            self.learned = name
        amount = self.amount()
        self.seeds[ordinal] = seed = self.seed()
        end = self.expect(")").at + 1
        return _Sample(name.text, node, amount, seed, ordinal, name.at, self.text[name.at : end])

    def amount(self) -> str | _Node:
        if self.token.text == COUNT:
            self.take()
            return self.parenthesised()
        if self.token.kind != "number" or not (self.token.text.isdigit() or self.token.text.endswith("%")):
            raise self.unexpected(f"a whole number, a percentage or {COUNT}(...)")
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
        """Parse the text as start values."""
        inits = [self.init()]
        while self.sees("+"):
            self.take()
            inits.append(self.init())
        self.finish("+ or the end")
        self.refuse_learned("it cannot be used in start values")
        return tuple(inits)

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
    similar = by_lower_case.get(token.text.lower(), token.text)
    return _error(text, token.at, f'no {what} "{token.text}"', suggest(similar, known))


# ---- public functions ------------------------------------------------------------------------------------------


def select(anatomy: Anatomy, text: str, seed: int = 0) -> Selection:
    """The entries of a model that a text of the selection language names."""
    if seed < 0:
        raise SelectionError(f"the seed of a selection is {seed}; it must not be negative.")
    return _Parser(text).selection().select(_Context(anatomy, text, seed))


def check(text: str) -> None:
    """Raise SelectionError for a text that is not a selection of any model."""
    _Parser(text).selection()


def is_learned(text: str) -> bool:
    """Whether training determines the entries of the selection, as for diff_pruning."""
    parser = _Parser(text)
    parser.selection()
    return parser.learned is not None


def asks_for_nothing(text: str) -> bool:
    """Whether a text is `none`, as opposed to naming entries that a model does not have."""
    return _Parser(text).selection() == _Group("none")


def parse_init(text: str) -> tuple[Init, ...]:
    """The start values in a text like `zero(b_q) + reinit(W_q)`, in order."""
    return _Parser(text).inits()


@dataclass(frozen=True, slots=True)
class Call:
    """A graft named in a text, with its arguments as texts."""

    word: str
    arguments: tuple[str, ...]


def parse_inject(text: str) -> tuple[Call, ...]:
    """The grafts in a text like `b_v + lora(W_q, 8)`. Summands that are not calls select biases, in one call."""
    calls: list[Call] = []
    summands: list[str] = []
    for tokens in _split(list(_tokens(text))[:-1], "+"):
        is_call = len(tokens) > 1 and tokens[0].kind == "word" and tokens[1].text == "("
        if is_call and tokens[0].text not in STRATEGIES:
            calls.append(_call(text, tokens))
        else:
            summands.append(_source(text, tokens))
    biases = " + ".join(summands)
    if summands and injects(biases):
        parser = _Parser(biases)
        parser.selection()
        parser.refuse_learned("it cannot be used in --inject")
        calls.insert(0, Call("bias", (biases,)))
    return tuple(calls)


def check_inject(text: str) -> None:
    """Raise SelectionError for a text that names no grafts of any encoder."""
    for call in parse_inject(text):
        GRAFTS[call.word].check(call.arguments)


def _call(text: str, tokens: Sequence[_Token]) -> Call:
    word = tokens[0]
    if word.text not in GRAFTS or word.text == "bias":
        raise _unknown(text, word, "graft", [name for name in GRAFTS if name != "bias"])
    if tokens[-1].text != ")":
        raise _error(text, tokens[-1].at, f"expected a ) that ends {word.text}(")
    arguments = [_source(text, argument) for argument in _split(tokens[2:-1], ",")]
    return Call(word.text, tuple(arguments))


def _split(tokens: Sequence[_Token], sign: str) -> list[list[_Token]]:
    """Split tokens at a sign, unless it is inside parentheses."""
    runs: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "sign":
            depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.kind == "sign" and token.text == sign:
            runs.append([])
        else:
            runs[-1].append(token)
    return runs


def _source(text: str, tokens: Sequence[_Token]) -> str:
    """The text between the first and the last of these tokens."""
    if not tokens:
        return ""
    last = tokens[-1]
    return text[tokens[0].at : last.at + len(last.text)]
