"""Checkpoints of a training run: verified files, written all or nothing, the last two of each pass kept."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Tensors
from ..delta import safefile
from ..errors import DeltaError, UsageError, WriteError

KEPT = 2
SECONDS = 10.0
SHARE = 20  # a checkpoint may cost at most about 1/20 of the time between two


class Store:
    """Where one run keeps its checkpoints; without a folder it keeps none."""

    def __init__(self, folder: Path | None, key: str, seconds: float = SECONDS) -> None:
        self.folder = folder
        self.key = key
        self._seconds = seconds
        self._wait = seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether enough time has passed since the last checkpoint."""
        return self.folder is not None and time.monotonic() - self._last >= self._wait

    def save(self, part: int, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Write the state of pass `part` after `step`, then drop what is older than the one before.

        A disk that is full costs the checkpoint, not the run: there is a warning and the training goes on.
        """
        if self.folder is None:
            return
        began = time.monotonic()
        try:
            safefile.write(self.folder / f"pass{part}-{step:09d}.checkpoint", tensors, {"key": self.key, **facts})
            for old in self._files(part)[:-KEPT]:
                old.unlink(missing_ok=True)
        except (UsageError, WriteError) as error:
            warnings.warn(f"no checkpoint: {error}", UserWarning, stacklevel=2)
        self._last = time.monotonic()
        self._wait = max(self._seconds, SHARE * (self._last - began))

    def load(self, part: int) -> tuple[int, Tensors, dict[str, Any]] | None:
        """The newest usable state of a pass as (step, tensors, facts); a damaged one gives way to the one before."""
        for path in reversed(self._files(part)):
            try:
                tensors, facts = safefile.read(path, finite=False)
            except DeltaError as error:
                path.unlink(missing_ok=True)  # or it would count as one of the two that are kept
                left = "going back to the checkpoint before it" if self._files(part) else "starting this pass anew"
                warnings.warn(f"{error}; {left}", UserWarning, stacklevel=2)
                continue
            if facts.get("key") != self.key:
                raise UsageError(
                    f"{self.folder} holds checkpoints of another run (other data, base or options); "
                    "use the same command, another --out, or leave --resume away to start anew"
                )
            return int(path.stem.split("-")[1]), {name: np.array(array) for name, array in tensors.items()}, facts
        return None

    def clear(self) -> int:
        """Remove all checkpoints, and what a killed write left behind; how many there were."""
        if self.folder is None or not self.folder.is_dir():
            return 0
        checkpoints = list(self.folder.glob("pass*.checkpoint"))
        for path in [*checkpoints, *self.folder.glob(".pass*.tmp")]:
            path.unlink(missing_ok=True)
        return len(checkpoints)

    def _files(self, part: int) -> list[Path]:
        if self.folder is None:
            return []
        pattern = re.compile(rf"pass{part}-\d{{9}}\.checkpoint")
        return sorted(path for path in self.folder.glob("*.checkpoint") if pattern.fullmatch(path.name))
