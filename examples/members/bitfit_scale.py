"""A graft for bitfit: `--inject "scale(W_k + W_v)"` learns a factor for each output of these matrices (as IA3 does)."""

from torch import Tensor

from bitfit.errors import SelectionError
from bitfit.model.anatomy import Site
from bitfit.model.grafts import Insertion, Place
from bitfit.model.language import check, select
from bitfit.model.selection import overlap

PLACES = ("q", "k", "v", "m1", "m2", "m3")
ENDING = ".scale"


class Scale:
    """Outputs y become y + s * y; s starts at zero, so that nothing changes at first."""

    example = "scale(W_k + W_v)"
    terms = tuple(f"s_{place}" for place in PLACES)
    reads_output = True
    packed = True

    def check(self, arguments):
        """Refuse what is not one selection."""
        if len(arguments) != 1:
            raise SelectionError("write scale(SELECTION), e.g. scale(W_k + W_v).")
        check(arguments[0])

    def insert(self, target, arguments):
        """A vector for every selected matrix of a layer."""
        self.check(arguments)
        chosen = select(target.anatomy, arguments[0])
        sites = []
        for site in target.anatomy.sites:
            if not overlap(site, chosen):
                continue
            place = site.term.partition("_")[2]
            if len(site.shape) != 2 or not site.whole or place not in PLACES:
                raise SelectionError(f"scale takes whole matrices inside the layers; {site.name} is not one.")
            _, outputs = target.sizes(site)
            name = site.name.removesuffix(".weight") + ENDING
            sites.append(Site(f"s_{place}", site.layer, name, (outputs,), graft="scale"))
        if not sites:
            raise SelectionError(f"{arguments[0]} selects no matrix of this base.")
        return Insertion(tuple(sites))

    def locate(self, name):
        """Its tensors' names end in .scale."""
        return (Place("scale", name.removesuffix(ENDING)), "scale") if name.endswith(ENDING) else None

    def problem(self, target, place, shapes):
        """A vector fits a matrix of a layer with as many outputs."""
        site = target.matrix(place)
        if site is None:
            return f"the delta scales {place.module}, where the base has no matrix"
        _, outputs = target.sizes(site)
        if shapes["scale"] != (outputs,):
            return f"the delta's scale at {place.module} has shape {shapes['scale']}, its matrix has {outputs} outputs"
        return None

    def start(self, site, generator) -> Tensor | None:
        """Zeros, which need not be saved."""
        return None

    def forward(self, x, tensors, activation):
        """s * y for the rows of each lane."""
        return x * tensors["scale"].unsqueeze(1)

    def backward(self, x, tensors, above) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Left to autograd."""
        return None

    def merged(self, tensors) -> Tensor | None:
        """No change of the matrix alone does the same: the bias is scaled as well."""
        return None


SCALE = Scale()
