"""The example package: installed beside bitfit, its strategy is a word of the selection language."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "examples" / "strategy"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that finds the package installed."""
    target = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(PACKAGE)], check=True)
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def bitfit(environment, *words):
    return subprocess.run([sys.executable, "-m", "bitfit", *words], env=environment, capture_output=True, text=True)


def test_an_installed_strategy_counts(installed, folders):
    done = bitfit(installed, "count", str(folders("bert")), "--select", "smallest(W_q, 10)", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["terms"]["W_q"]["trained"] == 10


def test_an_installed_strategy_selects_the_smallest_entries(installed, folders):
    script = (
        "import sys, numpy as np, bitfit\n"
        "base = bitfit.load_base(sys.argv[1])\n"
        "chosen = bitfit.select(base, 'smallest(b_q, 5)').entries\n"
        "values = {n: np.abs(p.detach().numpy()) for n, p in base.parameters.items() if n.endswith('query.bias')}\n"
        "largest = max(values[name][index].max() for name, index in chosen.items())\n"
        "assert sum((value <= largest).sum() for value in values.values()) == 5\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folders("bert"))], env=installed, check=True)


def test_without_the_package_the_word_is_unknown(folders):
    done = bitfit(None, "count", str(folders("bert")), "--select", "smallest(W_q, 10)")
    assert done.returncode == 2 and "smallest" in done.stderr
