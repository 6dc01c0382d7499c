"""Deltas on the Hugging Face hub: pushed to and read from a hub on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

import bitfit
from bitfit import Delta, evaluate, export_peft, import_peft, predict, push
from bitfit.cli.main import run
from bitfit.delta.hub import HubPath, parse
from bitfit.delta.peft_folder import WEIGHTS
from bitfit.errors import DeltaError, ServiceError, UsageError
from fakehub import TOKEN, FakeHub, Repository
from support import delta_of

# huggingface_hub uploads large files in a way that its HTTP library calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub that the environment points to, with a token, and an empty cache."""
    made = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield made
    made.close()


@pytest.fixture
def delta(base: Any) -> Delta:
    return delta_of(base, labels=3, name="trec")


def card_of(hub: FakeHub, name: str = "me/model") -> tuple[dict[str, Any], str]:
    """The metadata and the text of a repository's card."""
    repository = hub.repositories[name]
    content = repository.commits[repository.resolve("main")]["README.md"].decode()
    _, front, text = content.split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_pushed_delta_comes_back_with_the_same_bytes(hub, delta):
    assert push(delta, "me/model") == f"{hub.url}/me/model"
    found = Delta.load("hf:me/model")
    assert found.encode() == delta.encode()


def test_a_delta_goes_to_the_large_file_storage_and_the_card_does_not(hub, delta):
    push(delta, "me/model")
    assert hub.repositories["me/model"].large == {"delta.safetensors"}


def test_a_repository_that_exists_gets_another_commit_and_old_revisions_stay(hub, base, delta):
    push(delta, "me/model")
    first = hub.repositories["me/model"].resolve("main")
    second = delta_of(base, 7, labels=3)
    push(second, "me/model", message="better")
    assert hub.repositories["me/model"].messages[-1] == "better"
    assert Delta.load("hf:me/model").encode() == second.encode()
    assert Delta.load(f"hf:me/model@{first}").encode() == delta.encode()
    assert Delta.load(f"hf:me/model@{first}/delta.safetensors").encode() == delta.encode()


def test_a_private_repository_needs_the_token(hub, delta, monkeypatch):
    push(delta, "me/model", private=True)
    assert hub.repositories["me/model"].private
    assert Delta.load("hf:me/model").encode() == delta.encode()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "2")
    with pytest.raises(DeltaError, match="no such repository on the hub, or a private one"):
        Delta.load("hf:me/model")


def test_a_path_of_the_hub_is_taken_wherever_a_delta_is(hub, base, delta, csv_file, tmp_path):
    push(delta, "me/model")
    expected = predict(delta, ["good film"], base)
    assert predict("hf:me/model", ["good film"], base) == expected
    mixed = predict([("hf:me/model", "good film"), (delta, "good film")], base=base)
    assert mixed[0] == mixed[1]
    csv_file.write_text("text,label\ngood film,c0\nbad film,c1\n")
    assert evaluate("hf:me/model", csv_file, base).rows == 2
    assert bitfit.Predictor("hf:me/model", base).delta.encode() == delta.encode()


def test_the_commands_take_paths_of_the_hub(hub, base, delta, folders, tmp_path, capsys):
    file = tmp_path / "delta.safetensors"
    delta.save(file)
    assert run(["push", str(file), "me/model", "--private", "--message", "first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"repository": "me/model", "url": f"{hub.url}/me/model"}
    folder = ["--base", str(folders("bert"))]
    assert run(["inspect", "hf:me/model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == file.stat().st_size
    assert run(["predict", "hf:me/model", "good film", *folder, "--out", str(tmp_path / "rows.csv")]) == 0
    assert run(["export", "hf:me/model", "--out", str(tmp_path / "out"), *folder]) == 0


def test_the_only_file_of_a_repository_is_its_delta(hub, delta):
    push(delta, "me/model")
    repository = hub.repositories["me/model"]
    files = repository.commits[repository.resolve("main")]
    files["other.safetensors"] = files.pop("delta.safetensors")
    assert Delta.load("hf:me/model").encode() == delta.encode()
    files["third.safetensors"] = files["other.safetensors"]
    with pytest.raises(
        DeltaError, match=r"has 2 safetensors files.* append /FILE with one of other.safetensors, third"
    ):
        Delta.load("hf:me/model")
    assert Delta.load("hf:me/model/third.safetensors").encode() == delta.encode()


def test_an_adapter_of_peft_is_imported_from_the_hub(hub, base, delta, tmp_path):
    folder = export_peft(delta, base, tmp_path / "peft")
    hub.repositories["me/adapter"] = Repository()
    hub.repositories["me/adapter"].commit({path.name: path.read_bytes() for path in folder.iterdir()}, "adapter")
    assert import_peft("hf:me/adapter", base).labels == delta.labels
    del hub.repositories["me/adapter"].commits[hub.repositories["me/adapter"].resolve("main")][WEIGHTS]
    with pytest.raises(DeltaError, match=rf"hf:me/adapter/{WEIGHTS}: the repository has no such file"):
        import_peft("hf:me/adapter", base)


# ---- the card


def test_the_card_says_base_task_scores_and_selection(hub, base, delta):
    push(delta, "me/model")
    table, text = card_of(hub)
    assert "base_model" not in table  # the base is a folder of this machine
    assert table["pipeline_tag"] == "text-classification"
    assert table["metrics"] == ["accuracy"]
    assert table["model-index"][0]["results"][0]["metrics"] == [{"type": "accuracy", "value": 0.5}]
    assert "| dev | accuracy | 50.0 | 0.0 to 100.0 |" in text
    assert "Selection `bias`, head `full`: 1 of 1 parameters" in text
    assert 'bitfit.predict("hf:me/model", ["some text"], base="FOLDER")' in text
    assert f"the model folder `{base.name}`" in text


def test_the_card_of_a_base_of_the_hub_names_it(hub, base):
    delta = delta_of(base)
    push(Delta(delta.tensors, replace(delta.meta, base="owner/bert", hub=True)), "me/model")
    table, text = card_of(hub)
    assert table["base_model"] == "owner/bert"
    assert 'bitfit.predict("hf:me/model", ["some text"])' in text


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel", "tagging", "answering"])
def test_every_kind_has_a_card_that_the_hub_takes(hub, base, kind):
    push(delta_of(base, labels=3, kind=kind), "me/model")
    assert "bitfit" in card_of(hub)[0]["tags"]


def test_texts_of_a_delta_cannot_write_into_the_card(hub, base):
    delta = delta_of(base, labels=3)
    names = ("a\n---\nevil: 1", "<script>", "`x`")
    hostile = replace(delta.meta, labels=names, name="n\n---\nevil: true", base="b\nevil: 1\n<script>", hub=True)
    push(Delta(delta.tensors, hostile), "me/model")
    table, text = card_of(hub)
    assert "evil" not in table
    assert "<script>" not in text


def test_a_card_that_a_person_wrote_is_kept_and_a_written_one_is_replaced(hub, base, delta):
    push(delta, "me/model")
    push(delta_of(base, labels=3, name="sst2"), "me/model")
    assert "sst2" in card_of(hub)[1]
    repository = hub.repositories["me/model"]
    repository.commit({"README.md": b"---\ntags: []\n---\nmine"}, "by hand")
    push(delta, "me/model")
    assert card_of(hub)[1] == "mine"


# ---- what goes wrong


def test_without_a_token_nothing_is_sent(hub, delta, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no token for the hub; set HF_TOKEN, or run: hf auth login"):
        push(delta, "me/model")
    assert not hub.requests


def test_a_wrong_token_is_said_and_not_shown(hub, delta, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    with pytest.raises(ServiceError, match=r"the hub answered 401: .* the token in HF_TOKEN is not valid") as error:
        push(delta, "me/model")
    assert "hf_wrong" not in str(error.value)


def test_a_refusal_is_one_line_without_secrets(hub, delta):
    with pytest.raises(ServiceError, match=r"the hub answered 403: .*does not allow this") as error:
        push(delta, "forbidden/model")
    assert TOKEN not in str(error.value)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf:me/nothing", "no such repository on the hub"),
        ("hf:me/model@0123456789abcdef0123456789abcdef01234567", "has no such revision"),
        ("hf:me/model/other.safetensors", "has no such file"),
        ("hf:me/empty", "has no safetensors files"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line_and_exit_code_4(hub, delta, capsys, path, message):
    push(delta, "me/model")
    push(delta, "me/empty")
    repository = hub.repositories["me/empty"]
    del repository.commits[repository.resolve("main")]["delta.safetensors"]
    assert run(["inspect", path]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_no_delta_is_refused(hub, delta):
    push(delta, "me/model")
    repository = hub.repositories["me/model"]
    repository.commits[repository.resolve("main")]["delta.safetensors"] = b"not a delta"
    with pytest.raises(DeltaError, match="not a usable bitfit file"):
        Delta.load("hf:me/model")


def test_what_was_downloaded_answers_without_the_hub(hub, delta, monkeypatch):
    push(delta, "me/model")
    Delta.load("hf:me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert Delta.load("hf:me/model").encode() == delta.encode()
    assert len(hub.requests) == before
    with pytest.raises(ServiceError, match="cannot be reached, and the file is not in the local cache"):
        Delta.load("hf:me/other")
    with pytest.raises(ServiceError, match="HF_HUB_OFFLINE is set"):
        push(delta, "me/model")


def test_a_hub_that_is_down_is_one_line(hub, delta, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(["inspect", "hf:me/model"]) == 1
    assert "the hub cannot be reached" in capsys.readouterr().err
    with pytest.raises(ServiceError, match="the hub cannot be reached"):
        push(delta, "me/model")


def test_a_hub_that_fails_is_one_line(hub, delta, capsys):
    hub.fail, hub.reason = 500, f"broken at {hub.url}/x?signature=secret"
    assert run(["inspect", "hf:me/model"]) == 1
    assert capsys.readouterr().err == "bitfit: hf:me/model: the hub answered 500: broken at ...\n"
    with pytest.raises(ServiceError, match="the hub answered 500"):
        push(delta, "me/model")


@pytest.mark.parametrize("text", ["me/a@main", "me/a.b-c", "me/a/sub/x.safetensors", "me/a@v1/x.safetensors"])
def test_paths_are_read_and_written_alike(text):
    assert str(parse(f"hf:{text}")) == f"hf:{text}"


def test_a_revision_may_hold_a_slash():
    assert parse("hf:me/a@refs/pr/1") == HubPath("me/a", "refs/pr/1", None)
    assert parse("hf:me/a/x.safetensors@refs/pr/1") == HubPath("me/a", "refs/pr/1", "x.safetensors")


WRONG = ["hf:", "hf:model", "hf:me/", "hf:/x", "hf:me/../x", "hf:me/a@", "hf:me/a/x.bin", "hf:me/a/../x.safetensors"]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_path_is_a_usage_error_and_asks_nobody(hub, text):
    with pytest.raises(UsageError, match="is not a delta on the hub; write hf:owner/name"):
        Delta.load(text)
    assert not hub.requests


@pytest.mark.parametrize("name", ["model", "me/", "../x", "me/a/b", "me/.."])
def test_a_wrong_repository_is_a_usage_error_and_asks_nobody(hub, delta, name):
    with pytest.raises(UsageError, match="write owner/name"):
        push(delta, name)
    assert not hub.requests


def test_a_delta_file_asks_nobody(hub, base, delta, tmp_path):
    delta.save(tmp_path / "delta.safetensors")
    predict(tmp_path / "delta.safetensors", ["good film"], base)
    assert not hub.requests
