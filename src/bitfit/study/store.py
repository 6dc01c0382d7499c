"""Results as files: one per trial, named by a digest of what decides its outcome, written atomically. No torch.

A finished pass is first written to one journal file, then copied to the files of its trials. If the process is killed
in between, the next one finds the journal and finishes the copy, so that a pass is never stored by half.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..data.storage import Storage
from ..errors import DataError, UsageError
from ..values import Value, read_known
from .examples import Rows
from .grid import Point, by_cell
from .manifest import Manifest

try:
    import fcntl
except ImportError:  # Windows has none: there, two runs of a study are not kept apart
    fcntl = None  # type: ignore[assignment]

LOOP = 1  # raise it when a change of the training loop changes outcomes
FREEZING = 2  # and this one when AutoFreeze freezes other layers
JOURNAL = "results.json"


@dataclass(frozen=True)
class Result:
    """The outcome of one trial; only `cost` may differ between two runs of it."""

    key: str
    status: str  # done or diverged
    base: str
    task: str
    metric: str
    trial: Mapping[str, Any]
    rows: Mapping[str, int]
    majority: float
    scores: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)  # part -> metric -> value, low, high
    trained: int = 0
    total: int = 0
    best_epoch: float = 0.0
    change: Mapping[str, list[float | None]] = field(default_factory=dict)
    loss: list[list[float]] = field(default_factory=list)  # epoch, training loss
    evaluations: list[list[float]] = field(default_factory=list)  # epoch, dev loss, dev score
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    cost: Mapping[str, float] = field(default_factory=dict)  # seconds, memory in bytes, ...
    examples: Mapping[str, str] = field(default_factory=dict)  # part -> the result of each of its rows, encoded

    def score(self, part: str, metric: str | None = None) -> float | None:
        """A score as a fraction of 1; None for a diverged trial."""
        score = self.scores.get(part, {}).get(metric or self.metric)
        return score[0] if score else None

    def rows_of(self, part: str) -> Rows | None:
        """The result of each row of a part; None where it was not stored."""
        return Rows.decode(self.examples[part]) if part in self.examples else None


def key_of(trial: Mapping[str, Any], data: str, base: str) -> str:
    """The name of a result: a digest of everything that decides the outcome."""
    facts: dict[str, Any] = {"trial": dict(trial), "data": data, "base": base, "loop": LOOP}
    if trial.get("autofreeze"):
        facts["freezing"] = FREEZING
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class StoredPass:
    """The folder of a storage that has the checkpoints of a pass and, once it is finished, its results."""

    url: str  # of the storage
    name: str  # of the folder

    def finished(self, results: Iterable[Result]) -> None:
        """Store the results of the pass. They are committed by the run, or by the next one."""
        text = json.dumps([asdict(result) for result in results], allow_nan=False)
        Storage(self.url).write(f"{self.name}/{JOURNAL}", text.encode())


class Results:
    """A folder of results: trials/ holds one file per trial, STUDY/BASE.json says which of them are a study's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = folder / "trials"

    def has(self, key: str) -> bool:
        """Whether a trial is done."""
        return (self.trials / f"{key}.json").is_file()

    def read(self, key: str) -> Result | None:
        """The result of a trial, None if it is not done."""
        path = self.trials / f"{key}.json"
        return _typed(Result, path) if path.is_file() else None

    def pass_folder(self, study: str, base: str, keys: Iterable[str]) -> Path:
        """The folder of a pass's checkpoints while it runs."""
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
        return self.folder / "passes" / study / slug(base) / name

    def stored_pass(self, folder: Path) -> StoredPass | None:
        """The folder of a pass in the storage; None, because these results have no storage."""
        return None

    def commit(self, folder: Path, results: Iterable[Result]) -> None:
        """Store the results of a finished pass."""
        _dump(folder / JOURNAL, [asdict(result) for result in results])
        self._copy_journal(folder)

    def replay(self) -> None:
        """Finish the commits of processes that were killed."""
        for journal in sorted(self.folder.glob(f"passes/*/*/*/{JOURNAL}")):
            self._copy_journal(journal.parent)

    def _copy_journal(self, folder: Path) -> None:
        """Copy the results in a journal to the files of their trials, and remove the pass's folder."""
        for table in _load(folder / JOURNAL):
            _dump(self.trials / f"{table['key']}.json", table)
        shutil.rmtree(folder, ignore_errors=True)
        for empty in list(folder.parents)[:3]:
            if empty != self.folder and empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a study on a base; cells of earlier runs under the same conditions stay in it."""
        path = self.manifest_path(manifest)
        earlier = _load(path) if path.is_file() else None
        if isinstance(earlier, dict) and "runs" in earlier:
            manifest = manifest.joined(_typed(Manifest, path))
        _dump(path, asdict(manifest))

    def manifest_path(self, manifest: Manifest) -> Path:
        """The file of a manifest. It has the fingerprint, since two base folders may have the same name."""
        base = manifest.base
        return self.folder / manifest.study / f"{slug(base.name)}-{base.fingerprint[:6]}.json"

    def manifests(self, study: str) -> list[Manifest]:
        """The manifests of a study, one per base."""
        manifests = []
        for path in sorted((self.folder / study).glob("*.json")):
            table = _load(path)
            if not isinstance(table, dict) or "runs" not in table:
                raise DataError(f"{path}: of another version of bitfit; run the study again, finished trials are kept")
            manifests.append(_typed(Manifest, path))
        return manifests

    def known(self) -> list[str]:
        """The studies with results."""
        other_folders = {"trials", "passes"}
        return sorted({path.parent.name for path in self.folder.glob("*/*.json")} - other_folders)

    @contextmanager
    def locked(self, study: str) -> Iterator[None]:
        """One run of a study at a time: two would share checkpoints."""
        path = self.folder / study / ".lock"
        files.check_target(path)
        with path.open("w") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"{study} is being run in {self.folder} by another process; wait for it") from error
            yield


def standings(results: Mapping[Point, Result | None]) -> dict[Point, float | None]:
    """The dev scores that choose a rate; None for a trial without a result.

    A diverged run scores as the majority class, unless every run of its cell diverged.
    """
    scores: dict[Point, float | None] = {}
    for points in by_cell(results).values():
        done = [result for point in points if (result := results[point]) is not None]
        all_diverged = all(result.status == "diverged" for result in done)
        for point in points:
            result = results[point]
            if result is None:
                scores[point] = None
            elif result.status == "diverged" and not all_diverged:
                scores[point] = result.majority
            else:
                scores[point] = result.score("dev")
    return scores


def dev_losses(results: Mapping[Point, Result | None]) -> dict[Point, float]:
    """The dev loss of each trial's kept checkpoint, where it is known; it decides between equal dev scores."""
    losses = {}
    for point, result in results.items():
        if result is not None and result.status == "done" and result.evaluations:
            losses[point] = _kept_loss(result)
    return losses


def _kept_loss(result: Result) -> float:
    """The dev loss at the best epoch; epochs are rounded in a result."""
    _, loss, _ = min(result.evaluations, key=lambda line: abs(line[0] - result.best_epoch))
    return loss


def slug(name: str) -> str:
    """A name as a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", name).strip(".-") or "base"


def load_manifest(path: Path) -> Manifest:
    """A manifest from its file."""
    return _typed(Manifest, path)


def _typed(kind: type[Value], path: Path) -> Value:
    try:
        return read_known(kind, _load(path), str(path), DataError)
    except DataError as error:
        raise DataError(f"{error}; remove the file and run the study again") from error


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error


def _dump(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    files.replace(path, (text + "\n").encode())


def peak_memory() -> float:
    """The peak memory of this process since `reset_peak`, in bytes; 0 if the system does not report it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 0.0


def _return_memory() -> None:
    """Give memory that is no longer used back to the system; else a process would seem to need all it ever had."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # only the GNU library has it
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Reset the measurement of `peak_memory`, if the system allows it."""
    _return_memory()
    try:
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(descriptor, b"5")
    except OSError:
        pass
    finally:
        os.close(descriptor)
