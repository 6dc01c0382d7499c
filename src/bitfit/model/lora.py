"""LoRA (Hu et al. 2021): `lora(W_q + W_v, 8)` adds `alpha / r * B A x` to the outputs `W x` of each selected matrix.

`lora(SELECTION, r)` or `lora(SELECTION, r, alpha)`; alpha defaults to 2 r, as in that paper's runs on RoBERTa. A
starts uniform as in PEFT, B at zero. The scale alpha / r is saved beside the pair, so that the text of a file need not
be parsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SelectionError
from .anatomy import Site
from .grafts import Insertion, Place, Shape, Target
from .language import check, select
from .selection import overlap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LINEARS = ("q", "k", "v", "m1", "m2", "m3", "other")  # the names of linear layers in terms
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<role>A|B|scale)(?:_(?P<part>[a-z0-9]+))?")


class Lora:
    """A low-rank change of a matrix: A [r, inputs], B [outputs, r] and a scale."""

    example = "lora(W_q + W_v, 8)"
    terms: Sequence[str] = tuple(f"{letter}_{linear}" for letter in "AB" for linear in _LINEARS)
    reads_output = False
    packed = True

    def insert(self, target: Target, arguments: Sequence[str]) -> Insertion:
        """A pair for every selected matrix of a layer."""
        self.check(arguments)
        rank = int(arguments[1])
        alpha = float(arguments[2]) if len(arguments) == 3 else 2.0 * rank
        chosen = select(target.anatomy, arguments[0])
        sites: list[Site] = []
        constants = []
        for site in target.anatomy.sites:
            selected = overlap(site, chosen)
            if not selected:
                continue
            if len(site.shape) != 2 or site.layer is None or not site.name.endswith(".weight"):
                raise SelectionError(f"lora takes matrices inside the layers; {site.name} is not one.")
            if selected < site.size:
                raise SelectionError(f"lora takes whole matrices, not {selected:,} entries of {site.term}.")
            pair = self._pair(target, site, rank)
            sites += pair
            constants.append((_name(pair[0].name, "scale"), alpha / rank))
        if not sites:
            raise SelectionError(f"{arguments[0]} selects no matrix of this base.")
        return Insertion(tuple(sites), tuple(constants))

    def _pair(self, target: Target, site: Site, rank: int) -> list[Site]:
        module = site.name.removesuffix(".weight")
        linear = site.term.partition("_")[2]
        ending = "" if site.whole else f"_{linear}"
        inputs, outputs = target.sizes(site)
        return [
            Site(f"A_{linear}", site.layer, f"{module}.lora_A{ending}", (rank, inputs), graft="lora"),
            Site(f"B_{linear}", site.layer, f"{module}.lora_B{ending}", (outputs, rank), graft="lora"),
        ]

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse what is not a selection, a rank and perhaps an alpha."""
        if len(arguments) not in (2, 3):
            raise SelectionError("write lora(SELECTION, r) or lora(SELECTION, r, alpha), e.g. lora(W_q + W_v, 8).")
        check(arguments[0])
        if not arguments[1].isdigit() or not 1 <= int(arguments[1]) <= 1 << 16:
            raise SelectionError(f"the rank of lora must be a whole number from 1 to 65536, not {arguments[1]}.")
        if len(arguments) == 3 and not (_is_number(arguments[2]) and float(arguments[2]) > 0):
            raise SelectionError(f"the alpha of lora must be a number above 0, not {arguments[2]}.")

    def locate(self, name: str) -> tuple[Place, str] | None:
        """Names end in .lora_A, .lora_B and .lora_scale, with _q, _k or _v if these share a matrix."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return Place("lora", match["module"], match["part"] or ""), match["role"]

    def problem(self, target: Target, place: Place, shapes: Mapping[str, Shape]) -> str | None:
        """A and B must belong to a matrix of a layer and agree in their rank."""
        where = f"lora at {place.module}"
        site = target.matrix(place)
        if site is None:
            return f"the delta has {where}, where the base has no matrix"
        if not {"A", "B"} <= set(shapes):
            return f"the delta's {where} has no A or no B"
        inputs, outputs = target.sizes(site)
        rank = shapes["A"][0] if shapes["A"] else 0
        fits = rank > 0 and shapes["A"] == (rank, inputs) and shapes["B"] == (outputs, rank)
        if not fits or shapes.get("scale", (1,)) != (1,):
            return f"the delta's {where} has shapes {dict(shapes)}, its matrix has {inputs} inputs, {outputs} outputs"
        return None

    def start(self, site: Site, generator: torch.Generator) -> Tensor | None:
        """B zero; A uniform within 1 / sqrt(inputs), which equals PEFT's Kaiming initialisation."""
        import torch

        if site.term.startswith("B_"):
            return torch.zeros(site.shape)
        bound = 1 / math.sqrt(site.shape[1])
        return torch.empty(site.shape).uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """scale * (x A') B'."""
        return _scaled(x @ tensors["A"].transpose(1, 2), tensors) @ tensors["B"].transpose(1, 2)

    def backward(
        self, x: Tensor, tensors: Mapping[str, Tensor], above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Written by hand: autograd would cost a few percent of the step of a small batch."""
        inner = _scaled(x @ tensors["A"].transpose(1, 2), tensors)
        d_inner = _scaled(above @ tensors["B"], tensors)
        gradients = {"A": d_inner.transpose(1, 2) @ x, "B": above.transpose(1, 2) @ inner}
        return d_inner @ tensors["A"], gradients

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """scale * B A."""
        change = tensors["B"] @ tensors["A"]
        return change * tensors["scale"] if "scale" in tensors else change


def _scaled(inner: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return inner * tensors["scale"].unsqueeze(-1) if "scale" in tensors else inner


def _name(name: str, role: str) -> str:
    """The name of another tensor of the same pair."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{leaf.replace('lora_A', f'lora_{role}', 1)}"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) is not None


LORA = Lora()
