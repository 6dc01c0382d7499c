"""The public surface: names, types, and what a notebook shows."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import bitfit
from bitfit.training.plan import Plan, PlanOptions
from support import delta_of


def test_dir_lists_every_public_name():
    assert set(bitfit.__all__) <= set(dir(bitfit))
    assert all(hasattr(bitfit, name) for name in bitfit.__all__)


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(bitfit.__file__).read_text())
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            seen |= {alias.asname: node.module for alias in node.names}
    assert seen == bitfit._MODULES


def test_importing_bitfit_imports_nothing_heavy():
    script = "import sys, bitfit; dir(bitfit); assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_options_of_train_are_the_fields_of_plan():
    options, plan = get_type_hints(PlanOptions), get_type_hints(Plan)
    assert options.pop("train_size") == int | None
    del plan["train_size"]  # a list of sizes is for `sweep`
    assert options == plan


def test_public_functions_say_what_they_take():
    for name in ("train", "sweep", "predict", "evaluate", "load_base", "export", "select", "count"):
        hints = inspect.signature(getattr(bitfit, name)).parameters.values()
        assert all(hint.annotation not in ("Any", inspect.Parameter.empty) for hint in hints), name


def test_a_delta_is_short_to_read_and_escaped_in_a_notebook(base):
    delta = delta_of(base)
    assert len(repr(delta)) < 150 and "classification" in repr(delta)
    hostile = bitfit.Delta(delta.tensors, replace(delta.meta, labels=("<script>", "b")))
    assert "&lt;script&gt;" in hostile._repr_html_() and "<script>" not in hostile._repr_html_()


def test_a_run_is_short_to_read_and_a_table_in_a_notebook(base, csv_file):
    run = bitfit.train(csv_file, base, lr=[1e-3, 1e-2], epochs=1)
    assert len(repr(run)) < 300 and "2 trials" in repr(run)
    assert run._repr_html_().count("<tr") == 3 and run._repr_html_().count("font-weight:bold") == 1


def test_training_says_in_python_what_it_says_on_the_command_line(base, csv_file, capsys):
    run = bitfit.train(csv_file, base, lr=1e-2, epochs=1)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    stages = [line for line in lines if line.endswith(" steps")]
    assert stages and [line for line in lines if line not in stages] == list(run.notes) and not printed.out
    result = bitfit.evaluate(run.best.delta, csv_file, base)
    assert capsys.readouterr().err.splitlines() == list(result.notes)


def test_training_in_python_is_quiet_on_request(base, csv_file, capsys):
    run = bitfit.train(csv_file, base, lr=1e-2, epochs=1, quiet=True)
    bitfit.evaluate(run.best.delta, csv_file, base, quiet=True)
    bitfit.predict(run.best.delta, ["good " * 300], base, quiet=True)
    assert capsys.readouterr() == ("", "")
    said = []
    bitfit.train(csv_file, base, lr=1e-2, epochs=1, say=said.append)
    assert any(line.endswith(" steps") for line in said) and not capsys.readouterr().err


def test_a_bar_ends_with_its_stage_and_shows_dev_only_if_there_is_one(monkeypatch):
    from io import StringIO

    from rich.console import Console

    from bitfit.terminal import progress

    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "err", console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    runner = SimpleNamespace(phase="search", best=-1e10, history=SimpleNamespace(losses=[SimpleNamespace(loss=0.5)]))
    assert "dev" not in progress._state([runner]) and "loss 0.500" in progress._state([runner])
    with progress.training_bar() as watch:
        watch(0, 1, 2, [runner])
        watch(0, 2, 2, [runner])
        console.print("the story")
        shown = screen.getvalue()
    before, _, after = shown.partition("the story")
    assert "search" in before and "search" not in after


def test_a_notebook_shows_progress_on_one_line(base, csv_file, capsys, monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    bitfit.train(csv_file, base, lr=1e-2, epochs=1, say=lambda _: None)
    lines = capsys.readouterr().err.split("\r")
    assert any("training" in line and "loss" in line for line in lines)
    assert not lines[-1] and "\n" not in "".join(lines)
