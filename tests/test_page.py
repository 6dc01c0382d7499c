"""The page, clicked through in a real browser: Debian's or another installed Chromium, headless."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as playwright

from service import ASK, CHANGE, TEXTS, Live, started, until
from support import delta_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# `.ci/run` installs one and says so: there a missing browser is a failure, not a skip.
if CHROMIUM is None and not os.environ.get("BITFIT_NEEDS_CHROMIUM"):
    pytest.skip("needs Chromium (apt-get install chromium)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def live(base: Any, tmp_path: Path) -> Iterator[Live]:
    from bitfit.serve.settings import Token, Tokens

    folder = tmp_path / "deltas"
    folder.mkdir()
    delta_of(base, 0).save(folder / "first.safetensors")
    delta_of(base, 1, 5, "mean").save(folder / "many-labels.safetensors")
    running = started(base, folder, Tokens(Token(ASK), Token(CHANGE)))
    yield running
    running.server.should_exit = True


@pytest.fixture
def page(browser: Any, live: Live) -> Iterator[Any]:
    errors: list[str] = []
    tab = browser.new_page()
    tab.on(
        "console", lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None
    )
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.set_default_timeout(20_000)
    tab.goto(f"http://127.0.0.1:{live.port}/")
    yield tab
    tab.close()
    assert not errors


def log_in(page: Any, token: str) -> None:
    page.locator("#token").wait_for()  # the page opens it when it is told that a token is needed
    page.fill("#token", token)
    page.get_by_role("button", name="Use it").click()


def test_a_task_is_added_asked_and_removed(page, live, base, tmp_path):
    delta_of(base, 2, 3).save(tmp_path / "Third Task.safetensors")
    page.get_by_text("A token is needed").first.wait_for()
    log_in(page, CHANGE)
    page.get_by_text("You may change tasks.").wait_for()
    page.set_input_files("#file", tmp_path / "Third Task.safetensors")
    assert page.input_value("#name") == "third-task"
    page.get_by_role("button", name="Add or replace").click()
    page.get_by_text("third-task is there").wait_for()
    page.locator("#list").get_by_text("third-task").click()
    page.fill("#text", "good film")
    page.keyboard.press("Control+Enter")
    page.locator(".result").nth(1).wait_for()
    assert page.locator(".result").count() == 2 and page.locator(".result .bar").count() == 2 + 3
    widths = (
        page.locator(".result")
        .nth(1)
        .locator(".fill")
        .evaluate_all("fills => fills.map(f => parseFloat(f.style.width))")
    )
    assert sum(widths) == pytest.approx(100, abs=0.5)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove third-task").click()
    page.get_by_text("third-task removed").wait_for()
    assert not (live.folder / "third-task.safetensors").exists()


def test_errors_are_told_not_swallowed(page, live, tmp_path):
    log_in(page, ASK)
    page.get_by_text("This token may not change tasks.").wait_for()
    page.fill("#search", "nothing like it")
    page.get_by_text("No task matches.").wait_for()
    page.fill("#search", "")
    page.get_by_text("2 tasks").wait_for()
    (live.folder / "first.safetensors").unlink()
    until(lambda: "first" not in live.service.repository.entries)
    page.fill("#text", "good film")
    page.get_by_role("button", name="Predict").click()
    page.get_by_text("first: no such task").wait_for()
    log_in(page, CHANGE)
    (tmp_path / "bad.safetensors").write_bytes(b"no delta")
    page.set_input_files("#file", tmp_path / "bad.safetensors")
    page.get_by_role("button", name="Add or replace").click()
    page.get_by_text("not a usable bitfit file").wait_for()
    assert not (live.folder / "bad.safetensors").exists()


def test_keys_find_the_search_and_a_phone_needs_no_sideways_scrolling(page, live):
    log_in(page, CHANGE)
    page.get_by_text("2 tasks").wait_for()
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator("h1").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("many")
    page.get_by_text("1 task", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def choose_table(page: Any, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    page.set_input_files("#csv", path)


def downloaded(page: Any) -> tuple[str, list[list[str]]]:
    with page.expect_download() as download:
        page.locator("#download a").click()
    text = Path(download.value.path()).read_bytes().decode("utf-8-sig")
    return download.value.suggested_filename, list(csv.reader(io.StringIO(text)))


def test_a_table_comes_back_with_the_answers_beside_its_rows(page, live, tmp_path):
    log_in(page, ASK)
    page.get_by_text("2 tasks").wait_for()
    rows = [["id", "review", "label"], *([str(n), text, "x"] for n, text in enumerate(TEXTS * 4))]
    rows[2][1] = 'two lines,\n"quoted"; and a comma'
    sheet = io.StringIO(newline="")
    csv.writer(sheet).writerows(rows)
    choose_table(page, tmp_path / "reviews.csv", sheet.getvalue().encode())
    page.get_by_text(f"reviews.csv: {len(rows) - 1} rows.").wait_for()
    page.get_by_role("button", name="Answer all rows").click()
    name, found = downloaded(page)
    answers = live.client.predict("first", [row[1] for row in rows[1:]])
    assert name == "reviews.answers.csv" and [row[:3] for row in found] == rows
    assert found[0][3:] == ["first:label", "score", *(f"p({label})" for label in answers[0]["scores"])]
    for row, answer in zip(found[1:], answers, strict=True):
        assert row[3] == answer["label"] and float(row[4]) == pytest.approx(answer["score"], abs=1e-5)
    assert page.locator("#preview tbody tr").count() == 5


def test_a_table_in_another_encoding_is_read_and_one_without_rows_is_refused(page, tmp_path):
    log_in(page, ASK)
    page.get_by_text("2 tasks").wait_for()
    choose_table(page, tmp_path / "old.csv", "text;n\r\ncaf\u00e9;1\r\n".encode("cp1252"))
    page.get_by_text("old.csv: 1 row. It is not UTF-8; read as Windows-1252.").wait_for()
    assert page.locator("#preview td").first.text_content() == "caf\u00e9"
    choose_table(page, tmp_path / "empty.csv", b"text\n")
    page.get_by_text("The file has no rows below its header.").wait_for()
    assert page.locator("#answer").is_hidden()
    choose_table(page, tmp_path / "sheet.csv", b"PK\x03\x04\x00\x00")
    page.get_by_text("This is not a text file.").wait_for()


def test_files_that_are_not_served_are_shown_with_the_reason(page, live):
    log_in(page, ASK)
    (live.folder / "my spam.safetensors").write_bytes((live.folder / "first.safetensors").read_bytes())
    (live.folder / "damaged.safetensors").write_bytes(b"damaged")
    page.get_by_text("2 files of the folder are not served").click()
    page.get_by_text("rename it to my-spam.safetensors").wait_for()
    page.get_by_text("damaged.safetensors").wait_for()


def test_the_api_page_lists_every_route(browser, live):
    tab = browser.new_page()
    tab.goto(f"http://127.0.0.1:{live.port}/docs")
    tab.get_by_text("POST /v1/predict").wait_for()
    assert tab.locator("h2").count() >= 9
    tab.close()


def test_a_task_for_pairs_is_not_asked_without_a_second_text(page, live, base, tmp_path):
    columns = {"text": "text", "label": "label", "text_pair": "second"}
    delta_of(base, 3, columns=columns).save(live.folder / "a-pair.safetensors")
    until(lambda: "a-pair" in live.service.repository.entries)
    log_in(page, ASK)
    page.get_by_text("3 tasks").wait_for()
    assert page.locator("#second").is_hidden()  # the first task for one text is chosen, not the first of all
    page.locator("#list").get_by_text("a-pair").click()
    page.fill("#text", "good film")
    page.get_by_role("button", name="Predict").click()
    assert page.locator("#pair:invalid").count() == 1 and page.locator(".result").count() == 0
    choose_table(page, tmp_path / "rows.csv", b"id,text\n1,good film\n")
    page.get_by_text("rows.csv: 1 row.").wait_for()
    assert page.input_value("#pair-column") == "" and page.locator("#pair-column:invalid").count() == 1
