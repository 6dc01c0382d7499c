"""Adapters (Houlsby et al. 2019): `adapter(64)` adds a bottleneck of that width after m1 and m3 of every layer.

The bottleneck adds `U f(D h + d) + u` to the output `h` of m1 or m3, before dropout and before the residual is added; f
is the activation of the base's feed-forward layers. D starts small and random, everything else at zero, so that the
base's outputs are unchanged at first. As that paper trains the LayerNorms too, write --select "injected + layernorm".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SelectionError
from .anatomy import Site
from .grafts import Insertion, Place, Shape, Target

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LINEARS = ("m1", "m3")  # the linear layers whose outputs get a bottleneck, by their names in terms
_FORMS = {"W_down": "down.weight", "b_down": "down.bias", "W_up": "up.weight", "b_up": "up.bias"}
_NAME = re.compile(r"(?P<module>.+)\.adapter_(?P<role>(?:down|up)\.(?:weight|bias))")
_SPREAD = 0.01


class Adapter:
    """A bottleneck on the outputs of a module: a linear layer down, an activation, a linear layer up."""

    example = "adapter(64)"
    terms: Sequence[str] = tuple(f"{form}_{linear}" for linear in _LINEARS for form in _FORMS)
    reads_output = True
    packed = True

    def insert(self, target: Target, arguments: Sequence[str]) -> Insertion:
        """The sites of a bottleneck after m1 and after m3 of every layer."""
        self.check(arguments)
        width = int(arguments[0])
        sites: list[Site] = []
        for site in target.anatomy.sites:
            linear = site.term.removeprefix("W_")
            if linear not in _LINEARS or site.term != f"W_{linear}" or site.layer is None:
                continue
            module = site.name.removesuffix(".weight")
            outputs = target.sizes(site)[1]
            for form, shape in _shapes(width, outputs).items():
                name = f"{module}.adapter_{_FORMS[form]}"
                sites.append(Site(f"{form}_{linear}", site.layer, name, shape, graft="adapter"))
        if not sites:
            raise SelectionError(
                "adapters are added after m1 and m3, which bitfit does not know for this architecture."
            )
        return Insertion(tuple(sites))

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse what is not a width."""
        if len(arguments) != 1 or not arguments[0].isdigit() or not 1 <= int(arguments[0]) <= 1 << 16:
            raise SelectionError("write adapter(WIDTH) with a whole number from 1 to 65536, e.g. adapter(64).")

    def locate(self, name: str) -> tuple[Place, str] | None:
        """Names end in .adapter_down.weight and the like."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return Place("adapter", match["module"]), match["role"]

    def problem(self, target: Target, place: Place, shapes: Mapping[str, Shape]) -> str | None:
        """All four tensors must be present, belong to m1 or m3, and agree in their width."""
        where = f"adapter at {place.module}"
        site = target.matrix(place)
        if site is None or site.term.removeprefix("W_") not in _LINEARS:
            return f"the delta has an {where}, where the base has neither m1 nor m3"
        if set(shapes) != set(_FORMS.values()):
            return f"the delta's {where} must have exactly these tensors: {', '.join(_FORMS.values())}"
        outputs = target.sizes(site)[1]
        width = shapes["down.bias"][0] if shapes["down.bias"] else 0
        expected = {_FORMS[form]: shape for form, shape in _shapes(width, outputs).items()}
        if width < 1 or dict(shapes) != expected:
            return f"the delta's {where} has shapes {dict(shapes)}, its layer has {outputs} outputs"
        return None

    def start(self, site: Site, generator: torch.Generator) -> Tensor | None:
        """D small and random, everything else zero."""
        import torch

        if site.term.startswith("W_down"):
            return torch.empty(site.shape).normal_(0.0, _SPREAD, generator=generator)
        return torch.zeros(site.shape)

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """U f(D x + d) + u."""
        import torch

        inner = torch.baddbmm(tensors["down.bias"].unsqueeze(1), x, tensors["down.weight"].transpose(1, 2))
        return torch.baddbmm(tensors["up.bias"].unsqueeze(1), activation(inner), tensors["up.weight"].transpose(1, 2))

    def backward(
        self, x: Tensor, tensors: Mapping[str, Tensor], above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Left to autograd."""
        return None

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """None: no matrix has the effect of a bottleneck."""
        return None


def _shapes(width: int, outputs: int) -> dict[str, Shape]:
    return {"W_down": (width, outputs), "b_down": (width,), "W_up": (outputs, width), "b_up": (outputs,)}


ADAPTER = Adapter()
