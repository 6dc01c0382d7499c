"""Fixtures of all tests: tiny bases, a labelled file, data of named tasks, a folder of deltas."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits for the first

from bitfit.data import named
from support import delta_of, make_folder, mini_rows, reviews, write_rows

settings.register_profile("bitfit", deadline=None)  # a busy machine fails no test
settings.load_profile("bitfit")


def pytest_collection_finish() -> None:
    """Spare the garbage collector the libraries and thousands of tests: every pass of a study calls it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from architecture to a model folder, made once."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_folder(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def bases(folders: Any) -> Any:
    """A function from architecture to a loaded base; tests must leave it as it was."""
    from bitfit import load_base

    loaded: dict[str, Any] = {}

    def base(architecture: str) -> Any:
        if architecture not in loaded:
            loaded[architecture] = load_base(folders(architecture))
        return loaded[architecture]

    return base


@pytest.fixture
def base(bases: Any) -> Any:
    """A tiny BERT."""
    return bases("bert")


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    """A labelled file of 64 reviews."""
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews()), encoding="utf-8")
    return path


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """A function that puts mini data of a task under a data folder; nothing else is found."""
    monkeypatch.setenv("BITFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BITFIT_DATA", raising=False)

    def make(name, **names):
        task = named.known()[name]
        for role, count in (("train", 48), ("dev", 24)):
            write_rows(tmp_path / "data" / name / f"{names.get(role, role)}.jsonl.gz", mini_rows(task, count))
        return tmp_path / "data"

    return make


@pytest.fixture
def tasks(base: Any, tmp_path: Path) -> dict[str, Any]:
    """A folder with a delta of every sort, by task name."""
    pair = {"text": "a", "label": "y", "text_pair": "b"}
    deltas = {
        "two": delta_of(base, 0),
        "five": delta_of(base, 1, 5, "mean"),
        "value": delta_of(base, 2, 0),
        "pair": delta_of(base, 3, 3, columns=pair),
        "sparse": delta_of(base, 4, select_text="bias + random(all, 40)"),
        "dense": delta_of(base, 5, select_text="W_q@0 + bias"),
        "several": delta_of(base, 6, 3, kind="multilabel"),
        "tags": delta_of(base, 7, 3, kind="tagging"),
        "answers": delta_of(base, 8, kind="answering", columns=pair, stride=4),
    }
    for name, delta in deltas.items():
        delta.save(tmp_path / f"{name}.safetensors")
    return deltas
