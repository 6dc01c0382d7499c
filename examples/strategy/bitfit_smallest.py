"""A strategy for bitfit: `--select "smallest(W_q, 0.1%)"` trains the entries with the smallest absolute values."""

import numpy as np

from bitfit.model.selection import Selection
from bitfit.model.strategies import Request


def smallest(request: Request) -> Selection:
    """The `request.count` entries of the operand that are closest to zero in the base."""
    names, indices, sizes = [], [], []
    for name in sorted(request.operand.entries):
        values = np.abs(request.values(name))
        chosen = request.operand.entries[name]
        if chosen is None:  # the whole tensor
            chosen = np.arange(values.size)
        names.append(name)
        indices.append(chosen)
        sizes.append(values[chosen])
    tensor = np.repeat(np.arange(len(names)), [len(chosen) for chosen in indices])
    order = np.argsort(np.concatenate(sizes), kind="stable")[: request.count]
    entries = {}
    for number, name in enumerate(names):
        taken = np.concatenate(indices)[np.sort(order[tensor[order] == number])]
        if taken.size:
            entries[name] = taken
    return request.selection(entries)
