"""Minutes long: every study end to end, studies killed at random moments, Ray with a worker killed, a real browser."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitfit.data import named
from bitfit.study import forecast, spec
from support import make_folder, shared, write_tasks

pytestmark = pytest.mark.slow
TASKS = tuple(sorted({task for name in spec.names() for task in spec.load(name).tasks if named.find(task)}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny base of four layers that pools by mean, and data for every task of the studies."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"), "bert", num_hidden_layers=4)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return str(folder), str(write_tasks(tmp_path_factory.mktemp("data"), TASKS, rows=24))


def command(tiny, name, results, *more):
    words = ["study", "run", name, "--base", tiny[0], "--data", tiny[1], "--results", str(results), "--threads", "1"]
    return [sys.executable, "-m", "bitfit", *words, "--epochs", "1", "--evals-per-epoch", "2", *more]


def outcomes(folder):
    """Every result by name, without what it cost."""
    found = {path.name: json.loads(path.read_text()) for path in (Path(folder) / "trials").glob("*.json")}
    return {name: {k: v for k, v in table.items() if k != "cost"} for name, table in found.items()}


@pytest.mark.parametrize("name", spec.names())
def test_every_study_runs_end_to_end_and_reports_all_it_promises(tiny, name, tmp_path):
    few = ["--batch", "8,16"] if name == "tiny-imdb" else []
    subprocess.run(command(tiny, name, tmp_path, "--seeds", "2", "--lr", "1e-2", *few), check=True)
    text = (tmp_path / name / "report.html").read_text()
    study = spec.load(name)
    for item in (*study.tables, *study.figures):
        assert f"<h3>{item.name}" in text
    assert "Nothing to draw yet" not in text and "the rest is missing" not in text
    assert len(list((tmp_path / "trials").iterdir())) > 1


@pytest.mark.parametrize("name", spec.names())
def test_the_small_run_that_a_page_prints_finds_its_base_and_data(name, tmp_path):
    """On a machine with the data: $BITFIT_MODELS and $BITFIT_DATA are all that the printed command needs."""
    folder = shared()
    words = forecast.small_command(spec.load(name))[1:]
    environment = {**os.environ, "BITFIT_MODELS": str(folder / "models"), "BITFIT_DATA": str(folder / "data")}
    run = [sys.executable, "-m", "bitfit", *words, "--dry-run"]
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "to run, 0 done" in " ".join(done.stdout.split())


def test_a_study_killed_10_times_ends_with_the_results_of_one_run(tiny, tmp_path):
    more = ["--tasks", "rte,sst2", "--seeds", "2", "--lr", "1e-2,1e-3", "--epochs", "6"]
    environment = {**os.environ, "BITFIT_CHECKPOINT_SECONDS": "0.2"}
    began = time.monotonic()
    subprocess.run(command(tiny, "bitfit-table3", tmp_path / "whole", *more), check=True, env=environment)
    took = time.monotonic() - began
    draw, cut = random.Random(0), command(tiny, "bitfit-table3", tmp_path / "cut", *more)
    for _ in range(10):
        process = subprocess.Popen(cut, env=environment, stdout=-3, stderr=-3)
        time.sleep(draw.uniform(0.3, 0.9) * took)
        process.kill()
        process.wait()
    subprocess.run(cut, check=True, env=environment)
    assert outcomes(tmp_path / "cut") == outcomes(tmp_path / "whole")
    assert not (tmp_path / "cut" / "passes").exists()


def test_ray_gives_the_same_results_though_a_worker_is_killed(tiny, tmp_path):
    pytest.importorskip("ray", reason="needs the ray extra")
    more = ["--tasks", "sst2", "--seeds", "2", "--lr", "1e-2", "--epochs", "30", "--method", "BitFit"]
    environment = {**os.environ, "BITFIT_CHECKPOINT_SECONDS": "0.2"}
    subprocess.run(command(tiny, "bitfit-table3", tmp_path / "local", *more), check=True, env=environment)
    words = command(tiny, "bitfit-table3", tmp_path / "ray", *more, "--engine", "ray", "--workers", "1")
    process = subprocess.Popen(words, env=environment)
    killed = 0
    while process.poll() is None:
        workers = _ray_workers(process.pid) if list((tmp_path / "ray").glob("passes/*/*/*/*.checkpoint")) else []
        if killed < 1 and workers:
            os.kill(workers[0], signal.SIGKILL)
            killed += 1
        time.sleep(0.1)
    assert process.returncode == 0 and killed == 1
    assert outcomes(tmp_path / "ray") == outcomes(tmp_path / "local")


def _ray_workers(driver: int) -> list[int]:
    """Processes under a driver that Ray has put to work on a task of ours."""
    parents, titles = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            titles[int(place.name)] = (place / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue

    def below(pid):
        while pid in parents and pid != driver:
            pid = parents[pid]
        return pid == driver

    return [pid for pid, title in titles.items() if title.startswith(b"ray::_perform") and below(pid)]


def test_a_browser_shows_a_report_without_a_complaint(tiny, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    evil = "<script>document.title='owned'</script>"
    text = (spec.FOLDER / "bitfit-maps.toml").read_text()
    text = text.replace('name = "bitfit-maps"', 'name = "mine"').replace("How much each", f"{evil} How much each")
    (tmp_path / "mine.toml").write_text(text)
    words = ["--tasks", "rte", "--seeds", "2", "--lr", "1e-2"]
    subprocess.run(command(tiny, str(tmp_path / "mine.toml"), tmp_path / "r", *words), check=True)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    page = f"file://{tmp_path / 'r' / 'mine' / 'report.html'}"
    shown = subprocess.run([browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert "<title>mine: &lt;script&gt;" in shown.stdout and "<svg" in shown.stdout
    assert "CONSOLE" not in shown.stderr, shown.stderr
