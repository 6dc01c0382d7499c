"""The service, over real connections: what is asked, refused, replaced and forgotten."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitfit import Delta, predict, train
from bitfit.delta.safefile import encode, read_claims
from bitfit.prediction.host import Resident
from support import delta_of

pytest.importorskip("starlette", reason="needs the serve extra")

from bitfit.errors import DeltaError, ServiceError
from bitfit.serve import schemas
from bitfit.serve.queue import Queue
from bitfit.serve.repository import Repository
from bitfit.serve.service import Service
from bitfit.serve.settings import Settings, Token, Tokens
from service import ASK, CHANGE, TEXTS, Live, numbers, started, until

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def changed(delta: Delta, **fields: Any) -> Delta:
    """The same delta with other metadata."""
    return replace(delta, meta=replace(delta.meta, **fields))


def poisoned(delta: Delta, value: float) -> Delta:
    return Delta({name: np.full_like(array, value) for name, array in delta.tensors.items()}, delta.meta)


@pytest.fixture
def serve(base: Any, tmp_path: Path) -> Iterator[Any]:
    running: list[Live] = []

    def start(folder: Path = tmp_path, **given: Any) -> Live:
        running.append(started(base, folder, **given))
        return running[-1]

    yield start
    for live in running:
        live.server.should_exit = True
        until(lambda live=live: not live.service.queue._threads or not live.service.queue._threads[0].is_alive())


@pytest.mark.parametrize("inject", ["adapter(16)", "lora(W_q + W_v, 8)"])
def test_32_tasks_with_grafts_in_one_batch_answer_as_each_does_alone(serve, base, csv_file, tmp_path, inject):
    trained = train(csv_file, base, inject=inject, select="injected", lr=1e-2, epochs=1).best.delta
    generator = np.random.default_rng(0)
    deltas = {}
    for number in range(32):
        tensors = {}
        for name, array in trained.tensors.items():
            noise = 0.0 if name.endswith("lora_scale") else 0.1
            tensors[name] = (array + noise * generator.standard_normal(array.shape)).astype(np.float32)
        deltas[f"task{number}"] = Delta(tensors, trained.meta)
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, delta in deltas.items():
        delta.save(folder / f"{name}.safetensors")
    items = [{"task": name, "text": TEXTS[number % len(TEXTS)]} for number, name in enumerate(deltas)]
    different = set()
    for item, answer in zip(items, serve(folder).client.predict_mixed(items), strict=True):
        alone = predict(deltas[item["task"]], [item["text"]], base)[0]
        np.testing.assert_allclose(numbers(answer), list(alone["scores"].values()), rtol=0, atol=1e-5)
        different.add(round(numbers(answer)[0], 3))
    assert len(different) > 16


def asked(name: str, number: int) -> tuple[dict[str, Any], Any]:
    """A request for a task, and the same for `predict`."""
    text, other = TEXTS[number], " ".join(TEXTS)  # longer than the 20 tokens these tasks read at once
    if name == "answers":
        return {"task": name, "question": text, "context": other}, (text, other)
    if name == "pair":
        return {"task": name, "text": text, "text_pair": other}, (text, other)
    if name == "tags":
        return {"task": name, "words": other.split()}, other
    return {"task": name, "text": text}, text


def test_every_kind_answers_as_predict_does_and_names_its_version(serve, tasks, base):
    live = serve(batch_tokens=24)
    items = [asked(name, i % len(TEXTS)) for i, name in enumerate([*tasks, *tasks])]
    for (item, text), answer in zip(items, live.client.predict_mixed([item for item, _ in items]), strict=True):
        expected = predict(tasks[item["task"]], [text], base)[0]
        np.testing.assert_allclose(numbers(answer), numbers(expected), atol=1e-5)
        assert {key: answer[key] for key in ("tags", "answer", "start", "labels") if key in answer} == {
            key: expected[key] for key in ("tags", "answer", "start", "labels") if key in expected
        }
        assert answer["task"] == item["task"] and answer["version"] == live.client.task(item["task"])["version"]


@pytest.mark.parametrize("long", ["windows", "head+tail"])
def test_a_long_text_is_read_as_the_delta_says(serve, base, tmp_path, long):
    delta = delta_of(base, 9, long=long)
    delta.save(tmp_path / "long.safetensors")
    texts = [" ".join(TEXTS), TEXTS[0]]
    answers = serve().client.predict("long", texts)
    for found, expected in zip(answers, predict(delta, texts, base), strict=True):
        assert numbers(found) == pytest.approx(numbers(expected), abs=1e-5)


def test_one_task_and_many_inputs(serve, tasks):
    answers = serve().client.predict("five", TEXTS)
    assert len(answers) == len(TEXTS) and all(len(answer["scores"]) == 5 for answer in answers)


def test_the_list_is_searched_by_name_and_label_and_paged(serve, tasks):
    live = serve()
    assert [task["name"] for task in live.client.tasks()] == sorted(tasks)
    assert [task["name"] for task in live.client.tasks("c4")] == ["five"]
    page = json.loads(live.call("GET", "/v1/tasks?offset=1&limit=2")[2])
    assert page["total"] == len(tasks) and [task["name"] for task in page["tasks"]] == sorted(tasks)[1:3]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"task": "none", "inputs": ["a"]}, 404, "inputs.0"),
        ({"items": [{"task": "two", "text": "a"}, {"task": "none", "text": "a"}]}, 404, "items.1"),
        ({"task": "../two", "inputs": ["a"]}, 422, "inputs.0"),
        ({"task": "two", "inputs": ["a", 3]}, 422, "inputs.1"),
        ({"task": "two", "inputs": [{"text": "a", "text_pair": "b"}]}, 422, "inputs.0"),
        ({"task": "pair", "inputs": ["a"]}, 422, "inputs.0"),
        ({"task": "pair", "inputs": [{"question": "a"}]}, 422, "inputs.0"),
        ({"task": "tags", "inputs": ["good", {"text": "a", "text_pair": "b", "words": ["c"]}]}, 422, "inputs.1"),
        ({"task": "two"}, 422, "task"),
        ({"task": "two", "inputs": []}, 422, "inputs"),
        ({"task": "two", "inputs": ["a"], "items": []}, 422, "items"),
        ({"task": "two", "inputs": ["a"], "more": 1}, 422, "more"),
        ({"task": "two", "inputs": ["a"], "deadline_ms": 0}, 422, "deadline_ms"),
        ({"task": "two", "inputs": ["a"], "deadline_ms": 10**400}, 422, "deadline_ms"),
        ({"task": "two", "inputs": ["a"] * 10_000}, 413, None),
        ({"task": "two", "inputs": [1] * 1_000_000}, 422, "inputs.0"),
        ({"items": [{}] * 500_000}, 422, "items.0.task"),
        ({"task": "two", "inputs": ["a"]} | {f"k{n}": 1 for n in range(1000)}, 422, "body"),
        ({"task": "tags", "inputs": [{"words": ["abcdefghij"] * 11_000}]}, 413, "inputs.0"),
        ({"task": "two", "inputs": ["a" * 1_000_000]}, 413, "inputs.0"),
        (b'{"task": "two", "inputs": ["\\ud800"]}', 422, "body"),
        (b'{"task": "two", "inputs": ["\xff"]}', 422, "body"),
        (b"[" * 100_000, 422, "body"),
        (b"", 422, "body"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(shared_live, body, status, field):
    found, answer = shared_live.ask(body)
    assert (found, answer["error"]["field"]) == (status, field), answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"task": "two", "input": ["a"]}, 'no field "input". Did you mean "inputs"?'),
        ({"task": "pair", "inputs": [{"txt": "a"}]}, 'no field "txt". Did you mean "text"?'),
        ({"items": [{"tsk": "two", "task": "two", "text": "a"}]}, 'no field "tsk". Did you mean "task"?'),
    ],
)
def test_an_unknown_field_gets_a_suggestion(shared_live, body, message):
    status, answer = shared_live.ask(body)
    assert status == 422 and answer["error"]["message"].startswith(message)


def test_scores_have_the_digits_of_float32(shared_live):
    answer = shared_live.ask({"task": "two", "inputs": ["good"]})[1]["results"][0]
    assert numbers(answer) == [float(f"{score:.7g}") for score in numbers(answer)]


def test_a_sentence_without_words_is_answered_without_tags(shared_live):
    found, answer = shared_live.ask({"task": "tags", "inputs": [{"words": []}, ""]})
    assert found == 200 and [result["tags"] for result in answer["results"]] == [[], []]


@pytest.fixture(scope="module")
def shared_live(bases: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    base, folder = bases("bert"), tmp_path_factory.mktemp("deltas")
    delta_of(base, 0).save(folder / "two.safetensors")
    delta_of(base, 3, 3, columns={"text": "a", "label": "y", "text_pair": "b"}).save(folder / "pair.safetensors")
    delta_of(base, 7, 3, kind="tagging").save(folder / "tags.safetensors")
    live = started(base, folder)
    yield live
    live.server.should_exit = True


@pytest.mark.parametrize("task", ["two", "tags"])
@pytest.mark.parametrize("text", ["", "\x00", "a\x00b", "\U0001f600" * 500, "\u202e\u0000\uffff", " " * 90_000])
def test_strange_texts_are_answered_or_refused(shared_live, task, text):
    assert shared_live.ask({"task": task, "inputs": [text]})[0] in ((200,) if task == "two" else (200, 422))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/tasks/..%2f..%2fetc%2fpasswd",
        "/v1/tasks/%2e%2e",
        "/v1/tasks/A",
        "/v1/tasks/a%00",
        "/v1/tasks/a%0a",
        "/v1/tasks/.x",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_name_that_is_a_path_is_refused(shared_live, method, path):
    before = sorted(shared_live.folder.parent.rglob("*"))
    status, _, _ = shared_live.call(method, path, b"x", Authorization=f"Bearer {CHANGE}")
    assert status in (404, 405, 422) and sorted(shared_live.folder.parent.rglob("*")) == before


def test_put_replace_and_delete_are_seen_at_once(serve, base, tmp_path):
    live = serve()
    first, second = delta_of(base, 0), delta_of(base, 1, 3)
    put = live.client.put("mine", first.encode())
    assert live.client.predict("mine", ["good film"])[0]["version"] == put["version"]
    changed = live.client.put("mine", second.encode())
    answer = live.client.predict("mine", ["good film"])[0]
    assert answer["version"] == changed["version"] != put["version"] and len(answer["scores"]) == 3
    assert (tmp_path / "mine.safetensors").read_bytes() == second.encode()
    assert live.client.delete("mine")["version"] == changed["version"] and not list(tmp_path.iterdir())
    with pytest.raises(ServiceError) as refused:
        live.client.predict("mine", ["good film"])
    assert refused.value.status == 404


def test_a_hostile_delta_is_refused_and_nothing_is_written(serve, base, bases, tmp_path):
    live = serve()
    good = delta_of(base, 0)
    data = good.encode()
    value = poisoned(delta_of(base, 2, 0), 1e3)
    nan = Delta({**good.tensors, "head.classifier.bias": np.array([np.nan, 0], np.float32)}, good.meta)
    bad = {
        "empty": b"",
        "noise": bytes(range(256)) * 9,
        "cut": data[:-1],
        "longer": data + b"x",
        "edited": data[:-1] + b"\xff",
        "pickle": b"\x80\x04\x95",
        "nan": nan.encode(),
        "other base": delta_of(bases("electra"), 0).encode(),
        "poison": poisoned(good, 1e30).encode(),
        "length": changed(good, max_length=9999).encode(),
        "labels": changed(good, labels=("a", "b", "c")).encode(),
        "kind": changed(good, task="magic").encode(),
        "no labels": encode(good.tensors, {**good.meta.table(), "labels": []}),
        "infinite": changed(value, spread=1e308, center=1e308).encode(),
    }
    for what, body in bad.items():
        status, _, text = live.call("PUT", "/v1/tasks/x", body, Authorization=f"Bearer {CHANGE}")
        assert status == 422, (what, status, text)
    assert not list(tmp_path.iterdir()) and not live.service.repository.entries


def test_an_upload_over_the_limit_is_refused_while_it_comes(serve):
    live = serve(max_delta=1)
    declared = live.call("PUT", "/v1/tasks/x", b"1" * (1 << 21), Authorization=f"Bearer {CHANGE}")
    assert declared[0] == 413
    line = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    chunks = (b"1" * (1 << 16) for _ in range(64))
    try:
        line.request("PUT", "/v1/tasks/x", chunks, {"Authorization": f"Bearer {CHANGE}"}, encode_chunked=True)
        assert line.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it hung up while we were still sending
    finally:
        line.close()
    assert not list(live.folder.iterdir())


def test_all_requests_together_may_not_fill_the_memory(serve, tasks, monkeypatch):
    from bitfit.serve import app

    live = serve()
    body = {"task": "two", "inputs": ["good"]}
    monkeypatch.setattr(app, "MAX_RECEIVING", 10)
    assert live.ask(body)[0] == 429
    monkeypatch.setattr(app, "MAX_RECEIVING", 1000)
    assert live.ask(body)[0] == 200 and live.service.receiving == 0


def test_changes_need_their_token_and_asking_needs_one_where_it_is_set(serve, tasks):
    live = serve(tokens=Tokens(Token(ASK), Token(CHANGE)))
    body = {"task": "two", "inputs": ["good"]}
    assert (
        live.ask(body)[0] == live.ask(body, Authorization="Bearer wrong")[0] == live.call("GET", "/metrics")[0] == 401
    )
    assert (
        live.ask(body, Authorization=f"Bearer {ASK}")[0] == live.ask(body, Authorization=f"Bearer {CHANGE}")[0] == 200
    )
    assert live.call("DELETE", "/v1/tasks/two")[0] == 401
    status, _, text = live.call("DELETE", "/v1/tasks/two", Authorization=f"Bearer {ASK}")
    assert status == 403 and b"predictions only" in text
    assert live.call("GET", "/healthz")[0] == live.call("GET", "/readyz")[0] == live.call("GET", "/")[0] == 200
    assert live.call("DELETE", "/v1/tasks/two", Authorization=f"Bearer {CHANGE}")[0] == 200


def test_without_a_change_token_nobody_may_change(serve, tasks):
    assert serve(tokens=Tokens()).call("DELETE", "/v1/tasks/two")[0] == 403


def test_a_foreign_host_name_is_turned_away_where_no_token_guards(serve, tasks):
    live = serve()
    assert live.ask({"task": "two", "inputs": ["a"]}, Host="evil.example")[0] == 421
    assert live.ask({"task": "two", "inputs": ["a"]}, Host="localhost:80")[0] == 200
    assert live.call("POST", "/v1/predict", b"{}", Content_Type="text/plain")[0] == 415


def test_pages_and_answers_carry_strict_headers(shared_live):
    for path in ("/", "/docs", "/v1/tasks", "/nowhere"):
        _, headers, _ = shared_live.call("GET", path)
        assert (
            "default-src 'none'" in headers["content-security-policy"]
            and headers["x-content-type-options"] == "nosniff"
        )
        assert "unsafe" not in headers["content-security-policy"] and headers["cache-control"] == "no-store"


def test_a_folder_of_another_base_is_not_ready_until_a_task_is_served(serve, base, bases, tmp_path):
    live = serve()
    assert live.call("GET", "/readyz")[0] == 200, "an empty folder waits for its first task"
    for name in ("a", "b"):
        delta_of(bases("electra"), 0).save(tmp_path / f"{name}.safetensors")
    until(lambda: len(live.service.repository.unused()) == 2)
    status, _, text = live.call("GET", "/readyz")
    assert status == 503
    assert json.loads(text)["trouble"] == "none of 2 files in the folder belongs to this base"
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    until(lambda: len(live.service.repository.unused()) == 3)
    assert "none of 3 files in the folder can be served" in live.call("GET", "/readyz")[2].decode()
    delta_of(base, 0).save(tmp_path / "good.safetensors")
    until(lambda: live.call("GET", "/readyz")[0] == 200)


def test_files_appear_change_and_go_without_a_restart(serve, base, tmp_path):
    live = serve()
    delta_of(base, 0).save(tmp_path / "new.safetensors")
    until(lambda: "new" in live.service.repository.entries)
    first = live.client.predict("new", ["good"])[0]["version"]
    delta_of(base, 1).save(tmp_path / "new.safetensors")
    until(lambda: live.client.predict("new", ["good"])[0]["version"] != first)
    (tmp_path / "new.safetensors").write_bytes(b"damaged")
    until(lambda: live.ask({"task": "new", "inputs": ["good"]})[0] == 404)
    assert "refused" in live.ask({"task": "new", "inputs": ["good"]})[1]["error"]["message"]


def test_a_damaged_file_is_found_out_before_it_answers(serve, base, tmp_path):
    data = bytearray(delta_of(base, 0).encode())
    data[-3] ^= 1
    (tmp_path / "x.safetensors").write_bytes(data)
    live = serve()
    assert live.ask({"task": "x", "inputs": ["good"]})[0] == 404
    assert not live.service.repository.entries


def test_links_out_of_the_folder_and_other_files_are_no_tasks(base, tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir(), outside.mkdir()
    delta_of(base, 0).save(outside / "secret.safetensors")
    delta_of(base, 0).save(inside / "real.safetensors")
    (inside / "leak.safetensors").symlink_to(outside / "secret.safetensors")
    (inside / "alias.safetensors").symlink_to(inside / "real.safetensors")
    (inside / "Upper.safetensors").write_bytes(b"")
    (inside / "folder.safetensors").mkdir()
    repository = Repository(inside, base.fingerprint)
    repository.scan()
    assert set(repository.entries) == {"real", "alias"}
    assert set(repository.unused()) == {"leak.safetensors", "Upper.safetensors", "folder.safetensors"}


@pytest.mark.parametrize("content", [b"", b"damaged", b"\xff" * 99, b"\x08" + bytes(7) + b"not JSON", bytes(8) + b"x"])
def test_a_broken_file_gets_one_reason_in_the_folder_and_in_an_upload(base, tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    repository = Repository(tmp_path, base.fingerprint)
    with pytest.raises(DeltaError) as refused:
        repository.verify("x", content)
    assert repository.scan().unused["x.safetensors"] == str(refused.value).removeprefix("x: ")


def test_files_that_are_not_served_are_listed_with_the_reason_and_logged_once(base, tmp_path):
    (tmp_path / "my spam.safetensors").write_bytes(delta_of(base, 0).encode())
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    (tmp_path / "notes.txt").write_text("not a delta")
    repository = Repository(tmp_path, base.fingerprint)
    first, second = repository.scan(), repository.scan()
    assert first.unused == repository.unused() and not second.unused
    assert "rename it to my-spam.safetensors" in repository.unused()["my spam.safetensors"]
    assert set(repository.unused()) == {"my spam.safetensors", "damaged.safetensors"}
    (tmp_path / "damaged.safetensors").unlink()
    (tmp_path / "my spam.safetensors").rename(tmp_path / "my-spam.safetensors")
    assert repository.scan().added == ["my-spam"] and not repository.unused()


def test_a_file_that_another_replaced_during_a_put_is_noticed(base, tmp_path, monkeypatch):
    ours, theirs = delta_of(base, 0), delta_of(base, 1)
    repository = Repository(tmp_path, base.fingerprint)
    path = tmp_path / "x.safetensors"
    monkeypatch.setattr("bitfit.files.sync_folder", lambda _: path.write_bytes(theirs.encode()))
    repository.put(repository.verify("x", ours.encode())[0], ours.encode())
    repository.scan()
    assert repository.entries["x"].version == repository.verify("x", theirs.encode())[0].version


def test_a_file_with_the_time_and_size_of_the_one_before_is_noticed(base, tmp_path):
    path, repository = tmp_path / "x.safetensors", Repository(tmp_path, base.fingerprint)
    first, second = (delta_of(base, k).encode() for k in (0, 1))
    assert len(first) == len(second)
    for data in (first, second):
        path.write_bytes(data)
        os.utime(path, (1, 1))
        repository.scan()
    assert repository.entries["x"].version == repository.verify("x", second)[0].version


def test_a_look_at_the_folder_does_not_hold_up_loading(base, tmp_path, monkeypatch):
    delta_of(base, 0).save(tmp_path / "x.safetensors")
    repository = Repository(tmp_path, base.fingerprint)
    repository.scan()
    delta_of(base, 1).save(tmp_path / "y.safetensors")
    loaded = []

    def slow(path: Path) -> Any:
        reader = threading.Thread(target=lambda: loaded.append(repository.read("x")), daemon=True)
        reader.start()
        reader.join(10)
        return read_claims(path)

    monkeypatch.setattr("bitfit.serve.repository.read_claims", slow)
    assert repository.scan().added == ["y"] and loaded


def test_a_link_is_replaced_and_removed_itself_not_what_it_points_to(serve, base, tmp_path):
    target = tmp_path / "kept"
    target.mkdir()
    (target / "a.txt").write_text("kept")
    folder = tmp_path / "deltas"
    folder.mkdir()
    (folder / "x.safetensors").symlink_to(target / "a.txt")
    live = serve(folder)
    live.client.put("x", delta_of(base, 0).encode())
    assert (target / "a.txt").read_text() == "kept" and not (folder / "x.safetensors").is_symlink()


def test_two_services_on_one_folder_see_each_others_changes(serve, base):
    first, second = serve(), serve()
    version = first.client.put("shared", delta_of(base, 0).encode())["version"]
    until(lambda: "shared" in second.service.repository.entries)
    assert second.client.predict("shared", ["good"])[0]["version"] == version
    second.client.delete("shared")
    until(lambda: first.ask({"task": "shared", "inputs": ["good"]})[0] == 404)


class Held:
    """Model threads that wait before a pass until they may go."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go, outputs = threading.Event(), threading.Event(), live.service.host.outputs
        monkeypatch.setattr(
            live.service.host, "outputs", lambda batch: self.reached.set() or (self.go.wait(30) and outputs(batch))
        )


def in_background(live: Live, bodies: list[Any]) -> tuple[list[threading.Thread], list[tuple[int, Any]]]:
    found: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda body=body: found.append(live.ask(body))) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, found


def test_requests_in_flight_keep_the_version_they_began_with(serve, base, monkeypatch):
    live = serve(workers=1)
    old = live.client.put("x", delta_of(base, 0).encode())["version"]
    expected = live.client.predict("x", ["good film"])[0]
    held = Held(live, monkeypatch)
    first, _ = in_background(live, [{"task": "x", "inputs": ["bad"]}])
    assert held.reached.wait(30)
    threads, found = in_background(live, [{"task": "x", "inputs": ["good film"]}] * 4)
    until(lambda: live.service.queue.waiting == 4)
    monkeypatch.setattr(live.service, "_verify", _without_trial(live.service))
    live.client.put("x", delta_of(base, 1).encode())
    live.client.delete("x")
    held.go.set()
    [thread.join() for thread in (*first, *threads)]
    for status, answer in found:
        assert status == 200 and answer["results"][0]["version"] == old
        np.testing.assert_allclose(numbers(answer["results"][0]), numbers(expected), atol=1e-5)


def _without_trial(service: Service) -> Any:
    from bitfit.serve.cache import Version

    def verified(name: str, data: bytes) -> Any:
        entry, delta = service.repository.verify(name, data)
        return entry, Version(name, entry.version, service.host.admit(delta))

    return verified


def test_a_full_queue_refuses_single_and_batch_requests_alike(serve, tasks, monkeypatch):
    live = serve(workers=1, queue=8)
    held = Held(live, monkeypatch)
    first, answered = in_background(live, [{"task": "two", "inputs": ["good"] * 2}])
    assert held.reached.wait(30)  # so that it is known what the first pass took
    rest, found = in_background(
        live, [{"task": name, "inputs": ["good"] * 2} for name in ("five", "value", "sparse", "two")]
    )
    until(lambda: live.service.queue.waiting >= 7)
    single = live.call("POST", "/v1/predict", {"task": "two", "inputs": ["good"] * 2})
    batch = live.call("POST", "/v1/predict", {"items": [{"task": "two", "text": "a"}] * 6})
    assert single[0] == batch[0] == 429 and int(single[1]["retry-after"]) == int(batch[1]["retry-after"]) == 1
    held.go.set()
    [thread.join() for thread in (*first, *rest)]
    assert {status for status, _ in (*answered, *found)} <= {200, 429} and live.service.queue.waiting == 0
    assert live.ask({"task": "two", "inputs": ["good"] * 8})[0] == 200


def test_a_noisy_task_leaves_room_and_turns_to_others(serve, tasks, monkeypatch):
    live = serve(workers=1, queue=64, batch_tokens=1)
    held = Held(live, monkeypatch)
    order: list[str] = []
    notify = live.service.queue._notify
    monkeypatch.setattr(
        live.service.queue,
        "_notify",
        lambda queries, failed=False: order.extend(query.task for query in queries) or notify(queries, failed),
    )
    noisy, found = in_background(live, [{"task": "two", "inputs": ["good"] * 8}] * 8)
    until(lambda: len(found) >= 3)
    assert [status for status, _ in found] == [429] * len(found)  # half of the queue is all one task gets
    quiet, _ = in_background(live, [{"task": "five", "inputs": ["good"]}])
    until(lambda: "five" in live.service.queue._chunks)
    held.go.set()
    [thread.join() for thread in (*noisy, *quiet)]
    assert order.index("five") <= 2


def test_a_pass_leaves_the_other_threads_their_part_of_the_queue():
    queue = Queue(None, Settings(workers=2), None)
    for n in range(8):
        chunk = SimpleNamespace(query=SimpleNamespace(task=f"t{n}", queued=1), tokens=40)
        queue._chunks[f"t{n}"] = deque([chunk])
        queue._reserve(f"t{n}", 1)
        queue._tokens += chunk.tokens
    assert [len(queue._take()) for _ in range(4)] == [4, 2, 2, 0]  # a half, then what is worth a pass


def test_a_deadline_gives_504_and_frees_the_queue(serve, tasks, monkeypatch):
    live = serve(workers=1)
    held = Held(live, monkeypatch)
    bodies = [{"task": "two", "inputs": ["good"] * 3, "deadline_ms": 100}] * 2
    assert [live.ask(body)[0] for body in bodies] == [504, 504]
    assert live.service.queue.waiting == 0
    held.go.set()


def test_a_client_that_leaves_takes_its_work_along(serve, tasks, monkeypatch):
    live = serve(workers=1)
    held = Held(live, monkeypatch)
    threads, _ = in_background(live, [{"task": "five", "inputs": ["good"]}])
    assert held.reached.wait(30)
    line = http.client.HTTPConnection("127.0.0.1", live.port)
    line.request(
        "POST", "/v1/predict", json.dumps({"task": "two", "inputs": ["good"] * 9}), {"Content-Type": "application/json"}
    )
    until(lambda: live.service.queue.waiting == 9)
    line.close()
    until(lambda: live.service.queue.waiting == 0)
    held.go.set()
    [thread.join() for thread in threads]


def test_a_stuck_or_dead_model_thread_is_not_ready(serve, tasks, monkeypatch):
    from bitfit.serve import queue, service

    monkeypatch.setattr(queue, "STUCK", 0.2)
    monkeypatch.setattr(service, "STUCK", 0.2)
    live = serve(workers=2)
    assert live.call("GET", "/readyz")[0] == 200
    held = Held(live, monkeypatch)
    threads, _ = in_background(live, [{"task": "two", "inputs": ["good"]}])
    until(lambda: live.call("GET", "/readyz")[0] == 503)
    held.go.set()
    [thread.join() for thread in threads]
    until(lambda: live.call("GET", "/readyz")[0] == 200)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(live.service.queue, "_run_pass", lambda *_: exec("raise SystemError"))
    in_background(live, [{"task": "two", "inputs": ["good"], "deadline_ms": 500}])[0][0].join()
    until(lambda: "died" in str(json.loads(live.call("GET", "/readyz")[2])["trouble"]))


def test_a_probe_that_fails_costs_no_model_thread(serve, tasks, monkeypatch):
    from bitfit.serve import service

    monkeypatch.setattr(service, "STUCK", 0.2)
    live = serve(workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(live.service.host, "outputs", lambda _: 1 / 0)
        assert live.call("GET", "/readyz")[0] == 503
    until(lambda: live.call("GET", "/readyz")[0] == 200)


def test_a_text_whose_answer_cannot_be_formed_leaves_its_neighbours_theirs(serve, tasks, monkeypatch):
    live = serve(workers=1)
    plain = Resident.answer

    def answer(self: Resident, reading: Any, outputs: Any) -> Any:
        return 1 / 0 if np.size(outputs) == 5 else plain(self, reading, outputs)

    monkeypatch.setattr(Resident, "answer", answer)
    sick, good = live.client.predict_mixed([{"task": "five", "text": "a"}, {"task": "two", "text": "a"}])
    assert "ZeroDivisionError" in sick["error"] and good["label"]


def test_a_client_that_leaves_while_it_sends_is_no_bug(serve, tasks):
    live = serve()
    with socket.create_connection(("127.0.0.1", live.port)) as line:
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        line.sendall(head + b"Content-Length: 100\r\n\r\n{")
        until(lambda: live.service.receiving)
    until(lambda: not live.service.receiving)
    until(lambda: 'status="499"' in live.service.metrics.text().decode())
    assert 'status="500"' not in live.service.metrics.text().decode()


def test_a_pass_that_fails_is_one_500_and_the_next_works(serve, tasks, monkeypatch):
    live = serve(workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(live.service.host, "outputs", lambda _: 1 / 0)
        assert live.ask({"task": "two", "inputs": ["good"]})[0] == 500
    assert live.ask({"task": "two", "inputs": ["good"]})[0] == 200


def test_a_poisoned_neighbour_changes_nobody(serve, base, tmp_path):
    deltas = {f"t{i}": delta_of(base, i) for i in range(31)}
    for name, delta in {**deltas, "sick": poisoned(deltas["t0"], 1e30)}.items():
        delta.save(tmp_path / f"{name}.safetensors")
    live = serve(workers=1)
    items = [{"task": name, "text": "good film"} for name in (*list(deltas)[:16], "sick", *list(deltas)[16:])]
    mixed = {answer["task"]: answer for answer in live.client.predict_mixed(items)}
    assert "error" in mixed["sick"]
    for name in deltas:
        alone = live.client.predict(name, ["good film"])[0]
        np.testing.assert_allclose(numbers(mixed[name]), numbers(alone), atol=1e-5)


def test_the_longest_unused_tasks_leave_memory_and_come_back(serve, base, tmp_path):
    for i in range(6):
        delta_of(base, i).save(tmp_path / f"t{i}.safetensors")
    live = serve()
    size = live.service.host.admit(delta_of(base, 0)).bytes
    live.service.cache.budget = 3 * size
    first = live.client.predict("t0", ["good"])[0]
    for i in (1, 2, 0, 3):
        live.client.predict(f"t{i}", ["good"])
    assert list(live.service.cache._versions) == ["t2", "t0", "t3"] and live.service.cache.bytes == 3 * size
    assert live.client.predict("t1", ["good"]) and live.client.predict("t0", ["good"])[0] == first


def test_nothing_in_flight_is_lost_at_the_end_and_the_next_is_told_503(serve, tasks, monkeypatch):
    live = serve(workers=1, drain=30)
    held = Held(live, monkeypatch)
    threads, found = in_background(live, [{"task": "two", "inputs": ["good"]}] * 20)
    until(lambda: live.service.in_flight == 20)
    live.server.handle_exit(15, None)
    assert live.ask({"task": "two", "inputs": ["good"]})[0] == 503 and live.call("GET", "/readyz")[0] == 503
    live.server.should_exit = True
    held.go.set()
    [thread.join() for thread in threads]
    assert [status for status, _ in found] == [200] * 20


def test_every_response_is_as_the_openapi_document_says(shared_live):
    shown = json.loads(shared_live.call("GET", "/openapi.json")[2])
    examples = {
        "/v1/tasks": schemas.TaskList,
        "/v1/tasks/two": schemas.TaskInfo,
        "/v1/unused": schemas.UnusedFiles,
        "/v1/stats": schemas.Stats,
        "/healthz": schemas.Health,
        "/readyz": schemas.Readiness,
        "/nowhere": schemas.ErrorResponse,
    }
    for path, model in examples.items():
        model.model_validate_json(shared_live.call("GET", path)[2], strict=True, extra="forbid")
        assert model.__name__ in shown["components"]["schemas"]
    _, answer = shared_live.ask({"task": "two", "inputs": ["good"]})
    assert schemas.PredictResponse.model_validate(answer, strict=True).results[0].task == "two"


def test_the_openapi_document_lists_every_route_and_resolves_every_reference(shared_live):
    text = shared_live.call("GET", "/openapi.json")[2].decode()
    shown = json.loads(text)
    served = {route.path for route in shared_live.server.config.app.routes} - {"/", "/docs", "/openapi.json"}
    assert set(shown["paths"]) == served
    assert set(shown["paths"]["/v1/tasks/{name}"]) == {"get", "put", "delete"}
    named = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert named and named == set(shown["components"]["schemas"])


@pytest.mark.parametrize(
    ("query", "field"), [("limit=0", "limit"), ("offset=x", "offset"), ("search=" + "a" * 300, "search")]
)
def test_a_wrong_query_string_is_refused_with_its_parameter(shared_live, query, field):
    status, _, text = shared_live.call("GET", f"/v1/tasks?{query}")
    assert status == 422 and json.loads(text)["error"]["field"] == field


def test_no_name_that_a_client_chooses_is_a_label_of_a_metric(shared_live):
    for path in ("/a", "/b", "/v1/tasks/none", "/v1/tasks/other"):
        shared_live.call("GET", path)
    shared_live.call("OPTIONS", "/v1/tasks")
    text = shared_live.call("GET", "/metrics")[2].decode()
    routes = {line.split('route="')[1].split('"')[0] for line in text.splitlines() if 'route="' in line}
    assert routes <= {route.path for route in shared_live.server.config.app.routes} | {"other"}
    assert 'method="other"' in text and "none" not in text


def test_refused_requests_are_counted_under_their_route(serve, tasks):
    live = serve(tokens=Tokens(Token(ASK), Token(CHANGE)))
    live.ask({"task": "two", "inputs": ["good"]})
    live.call("DELETE", "/v1/tasks/two")
    live.call("GET", "/nowhere")
    text = live.service.metrics.text().decode()
    assert "_created" not in text, "it repeats every series"
    for labels in (
        'method="POST",route="/v1/predict",status="401"',
        'method="DELETE",route="/v1/tasks/{name}",status="401"',
        'method="GET",route="other",status="401"',
    ):
        assert f"bitfit_requests_total{{{labels}}} 1.0" in text


def test_many_threads_asking_get_their_own_answers(serve, base, tmp_path):
    deltas = {f"t{i}": delta_of(base, i, 2 + i % 3, ("cls", "mean")[i % 2]) for i in range(12)}
    for name, delta in deltas.items():
        delta.save(tmp_path / f"{name}.safetensors")
    live = serve(workers=4)
    expected = {name: [numbers(a) for a in predict(delta, TEXTS, base)] for name, delta in deltas.items()}
    names = [f"t{i % 12}" for i in range(96)]
    _, found = threads_done(live, [{"task": name, "inputs": TEXTS[i % 6 : i % 6 + 4]} for i, name in enumerate(names)])
    assert len(found) == 96
    for status, answer in found:
        assert status == 200
        for result in answer["results"]:
            assert any(np.allclose(numbers(result), row, atol=1e-5) for row in expected[result["task"]])


def threads_done(live: Live, bodies: list[Any]) -> tuple[list[threading.Thread], list[tuple[int, Any]]]:
    threads, found = in_background(live, bodies)
    [thread.join() for thread in threads]
    return threads, found


def test_a_task_in_memory_weighs_less_than_its_file(base):
    from bitfit.prediction.host import Host

    host = Host(base)
    residents = [host.admit(delta_of(base, k)) for k in range(3)]
    assert len({id(resident.lane.slots) for resident in residents}) == 1
    assert 0 < residents[0].bytes < sum(array.nbytes for array in delta_of(base, 0).tensors.values())


def test_a_host_out_of_reach_of_others_needs_no_token_any_other_does(monkeypatch):
    from bitfit.errors import UsageError

    Tokens().check(Settings(host="127.0.0.1")), Tokens().check(Settings(host="::1"))
    with pytest.raises(UsageError, match="BITFIT_TOKEN"):
        Tokens().check(Settings(host="0.0.0.0"))
    with pytest.raises(UsageError, match="must differ"):
        Tokens.of_environment({"BITFIT_TOKEN": ASK, "BITFIT_CHANGE_TOKEN": ASK})
    with pytest.raises(UsageError, match="at least 16"):
        Tokens.of_environment({"BITFIT_TOKEN": "short"})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{tmp}/none"], "no such folder"),
        (["{tmp}", "--host", "0.0.0.0"], "BITFIT_TOKEN"),
        (["{tmp}", "--port", "{taken}"], "cannot listen"),
        (["{tmp}", "--port", "99999"], "--port"),
        (["{tmp}", "--queue", "-1"], "--queue"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_code_2(words, why, tmp_path, capsys, monkeypatch):
    from bitfit.cli import main as cli

    monkeypatch.delenv("BITFIT_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        facts = {"tmp": tmp_path, "taken": taken.getsockname()[1]}
        assert cli.run(["serve", *(word.format(**facts) for word in words)]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_a_stop_signal_during_the_start_is_exit_code_0(tmp_path, monkeypatch):
    from bitfit.cli import main as cli

    def start(*_: Any) -> None:
        raise KeyboardInterrupt  # as the handler of SIGTERM does

    monkeypatch.setattr("bitfit.serve.run.serve", start)
    assert cli.run(["serve", str(tmp_path)]) == 0


def test_start_and_stop_are_logged_as_info_at_every_level(monkeypatch, capsys):
    from bitfit.serve import logs

    monkeypatch.setattr(logs._LOGGER, "handlers", [])
    monkeypatch.setattr(logs._LOGGER, "propagate", False)
    level = logs._LOGGER.level
    logs.write_to_stderr("warning")
    try:
        logs.log("info", "request")
        logs.announce("listening", url="http://127.0.0.1/")
    finally:
        logs._LOGGER.setLevel(level)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("info", "listening")


def test_tokens_come_from_files_too(tmp_path):
    (tmp_path / "t").write_text(ASK + "\n")
    tokens = Tokens.of_environment({"BITFIT_TOKEN_FILE": str(tmp_path / "t")})
    assert tokens.predict is not None and tokens.predict.matches(ASK.encode()) and not tokens.predict.matches(b"other")


def test_a_paced_load_is_as_heavy_at_its_beginning_as_at_its_end():
    import random

    from bitfit.serve.load import due_times

    moments = np.array([t for k in range(64) for t in due_times(random.Random(k), 0.5, 100.0, 140.0)])
    counts = np.histogram(moments, 4, (100.0, 140.0))[0]
    assert counts.sum() == pytest.approx(64 * 0.5 * 40, rel=0.1) and counts.min() > 0.8 * counts.max()


def test_a_load_says_what_became_of_its_requests():
    from bitfit.serve.load import Load, Result

    load = Load("http://127.0.0.1:1")
    shown = Result(load, 1.0, np.array([0.004]), {0: 2, 200: 1, 429: 2840, 504: 3}).table()
    assert "1 answered, 2 without a response, 2,840 refused (429), 3 with status 504" in shown
    assert "(answered requests only)" in shown and "{" not in shown


def test_the_load_generator_counts_what_it_asked(shared_live):
    from bitfit.serve.load import Load, measure

    found = measure(Load(f"http://127.0.0.1:{shared_live.port}", clients=4, texts=3, seconds=0.3), ["good film"])
    assert set(found.codes) == {200} and sum(found.json()["histogram_ms"].values()) == found.codes[200] > 0
    assert "texts/s" in found.table() and "#" in found.table()
    paced = measure(Load(f"http://127.0.0.1:{shared_live.port}", clients=4, seconds=0.5, rate=20), ["good film"])
    assert 0 < paced.codes[200] < 40
