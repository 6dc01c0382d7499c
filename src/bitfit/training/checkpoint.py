"""Checkpoints of a run: verified files, written all or nothing. The last two of each pass are kept."""

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
SECONDS = 10.0  # between two checkpoints at least
SHARE = 20  # writing may take at most about 1/20 of the time between two checkpoints


class Store:
    """The checkpoints of one run; without a folder there are none."""

    def __init__(self, folder: Path | None, key: str, seconds: float = SECONDS) -> None:
        self.folder = folder
        self.key = key
        self._seconds = seconds
        self._wait = seconds
        self._last = time.monotonic()
        self._began = self._last, time.process_time()
        self._before = 0.0, 0.0  # spent by earlier processes, up to the checkpoint that was read

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds and seconds of CPU since the run began, those before its last stop included."""
        seconds = time.monotonic() - self._began[0]
        cpu = time.process_time() - self._began[1]
        return self._before[0] + seconds, self._before[1] + cpu

    def due(self) -> bool:
        """Whether it is time for the next checkpoint."""
        return self.folder is not None and time.monotonic() - self._last >= self._wait

    def save(self, number: int | str, step: int, tensors: Tensors, facts: dict[str, Any], kept: int = KEPT) -> None:
        """Write the state of pass `number` after `step`: tensors, and `facts` as JSON; remove all but its last ones.

        `number` may be a text that names a phase of a pass, which has separate checkpoints. If the disk is full there
        is a warning and the training goes on without this checkpoint.
        """
        if self.folder is None:
            return
        began = time.monotonic()
        facts = {"key": self.key, "spent": list(self.spent), **facts}
        try:
            safefile.write(self.folder / f"pass{number}-{step:09d}.checkpoint", tensors, facts)
            for old in self._files(number)[:-kept]:
                old.unlink(missing_ok=True)
        except (UsageError, WriteError) as error:
            warnings.warn(f"no checkpoint: {error}", UserWarning, stacklevel=2)
        self._last = time.monotonic()
        self._wait = max(self._seconds, SHARE * (self._last - began))

    def load(self, number: int | str) -> tuple[int, Tensors, dict[str, Any]] | None:
        """Step, tensors and facts of the newest usable checkpoint of a pass; a damaged one is removed."""
        for path in reversed(self._files(number)):
            try:
                tensors, facts = safefile.read(path, finite=False)
            except DeltaError as error:
                path.unlink(missing_ok=True)  # else it would count as one of the two that are kept
                next_ = "using the checkpoint before it" if self._files(number) else "starting this pass again"
                warnings.warn(f"{error}; {next_}", UserWarning, stacklevel=2)
                continue
            if facts.get("key") != self.key:
                raise UsageError(
                    f"{self.folder} holds checkpoints of another run (other data, base or options); "
                    "use the same command, another --out, or run without --resume to start again"
                )
            seconds, cpu = facts.get("spent", (0.0, 0.0))
            self._before = max(self._before, (seconds, cpu))
            step = int(path.stem.rpartition("-")[2])
            return step, {name: np.array(array) for name, array in tensors.items()}, facts
        return None

    def clear(self) -> int:
        """Remove all checkpoints and the temporary files of a killed write; returns how many checkpoints there were."""
        if self.folder is None or not self.folder.is_dir():
            return 0
        checkpoints = list(self.folder.glob("pass*.checkpoint"))
        for path in [*checkpoints, *self.folder.glob(".pass*.tmp")]:
            path.unlink(missing_ok=True)
        return len(checkpoints)

    def _files(self, number: int | str) -> list[Path]:
        if self.folder is None:
            return []
        pattern = re.compile(rf"pass{number}-\d{{9}}\.checkpoint")
        return sorted(path for path in self.folder.glob("*.checkpoint") if pattern.fullmatch(path.name))
