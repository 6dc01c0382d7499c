"""Where a run computes: the device and the number of CPU threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import UsageError


def pick_device(name: str) -> torch.device:
    """The named device; `auto` takes an accelerator where there is one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(known for known in ("cuda", "mps", "cpu") if available[known])
    if not available[name]:
        here = ", ".join(known for known in available if available[known])
        raise UsageError(f"--device {name}: not available here; this machine has {here}")
    return torch.device(name)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with this many threads while inside; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
