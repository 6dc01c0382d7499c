"""The delta file: what is saved comes back, what is damaged is refused, and the base is given back bit for bit."""

from __future__ import annotations

import copy
import json
import struct
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bitfit import files
from bitfit.delta import safefile
from bitfit.delta.delta import Delta
from bitfit.errors import DeltaError, WriteError
from support import reviews


@pytest.fixture(scope="module")
def delta(bases, tmp_path_factory):
    from bitfit import train

    path = tmp_path_factory.mktemp("delta") / "r.csv"
    path.write_text("text,label\n" + "".join(f"{t},{label}\n" for t, label in reviews(32)))
    return train(path, bases("bert"), lr=1e-2, epochs=1, select="bias + random(all, 200)").best.delta


@pytest.fixture
def path(delta, tmp_path):
    delta.save(tmp_path / "d.safetensors")
    return tmp_path / "d.safetensors"


def test_what_is_saved_comes_back(delta, path):
    again = Delta.load(path)
    assert again.meta == replace(delta.meta, sha256=again.meta.sha256)
    assert all(np.array_equal(again.tensors[name], value) for name, value in delta.tensors.items())


def test_the_same_delta_gives_the_same_bytes(delta, path):
    assert path.read_bytes() == delta.encode() == Delta.load(path).encode()


def test_plain_safetensors_reads_the_file(delta, path):
    from safetensors.numpy import load_file

    found = load_file(path)
    assert found.keys() == delta.tensors.keys()
    assert all(np.array_equal(found[name], delta.tensors[name]) for name in found)


def test_the_file_holds_no_time_path_or_host(delta):
    import platform

    text = json.dumps(delta.meta.table())
    assert "/" not in text and platform.node() not in text and time.strftime("%Y-") not in text


def test_applying_changes_the_base_and_undoing_restores_every_bit(delta, base):
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    undo = delta.apply(base)
    name = "encoder.layer.0.output.dense.bias"
    assert torch.equal(base.encoder.get_parameter(name), torch.from_numpy(np.array(delta.tensors[name])))
    undo()
    after = base.encoder.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_delta_on_the_wrong_base_is_refused_with_both_names(delta, bases):
    other = bases("roberta")
    with pytest.raises(DeltaError, match=rf"{delta.meta.base}.*{other.name}"):
        delta.apply(other)


def test_another_tokenizer_is_another_base(delta, tmp_path):
    from bitfit import load_base
    from support import make_folder

    folder = make_folder(tmp_path / "twin", "bert")
    same = load_base(folder)
    assert same.fingerprint == delta.meta.fingerprint
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["vocab"]["good"], rules["model"]["vocab"]["bad"] = (
        rules["model"]["vocab"]["bad"],
        rules["model"]["vocab"]["good"],
    )
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    assert load_base(folder).fingerprint != same.fingerprint


def rewritten(delta, tensors=None, **meta):
    return safefile.encode(tensors or dict(delta.tensors), {**delta.meta.table(), **meta})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 3}, "format 3"),
        ({"labels": [1, 2]}, "labels.0.: must be a text, not a whole number"),
        ({"labels": "positive"}, "labels: must be a list, not a text"),
        ({"change": {"b_q": "much"}}, "change"),
        ({"change": {"b_q": [0.1] * 5000}}, "change: a term has more than 1,000 layers"),
        ({"change": {"b_q": [10**400]}}, "change"),
        ({"change": {"b_q": [1e301]}}, "change: a number is too large"),
        ({"columns": {}}, 'columns: "text" is missing'),
        ({"columns": {"text": 5, "text_pair": None, "label": None}}, "columns.text: must be a text"),
        ({"metrics": {"dev": {}}}, "metrics: the dev score by accuracy is missing"),
        ({"metrics": {"dev": {"accuracy": {}}}}, "metrics.*value"),
        ({"metrics": {"dev": {"accuracy": {"value": "1", "low": 0, "high": 1}}}}, "metrics.*value"),
        ({"total": 0, "trained": 0}, "trained"),
        ({"trained": 10**400}, "trained"),
        ({"hub": 1}, "hub"),
        ({"max_length": True}, "max_length"),
        ({"trial": 5}, "trial: must be a table or nothing, not a whole number"),
        ({"trial": {"select": "bias"}}, 'trial: "head" is missing'),
        ({"fingerprint": 5}, "fingerprint"),
    ],
)
def test_metadata_of_the_wrong_form_is_refused(delta, change, says):
    tensors, table = safefile.decode(rewritten(delta, **change), "f")
    with pytest.raises(DeltaError, match=rf"^f: .*{says}"):
        Delta.checked(tensors, table, "f")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/root/x", "a..b", ".hidden", "a/b", "a\\b", "", "x" * 300, "a b", "é", "a\x00b"]
)
def test_path_like_names_are_refused(name):
    data = safefile.encode({name: np.zeros(2, np.float32)}, {})
    with pytest.raises(DeltaError, match="not a parameter name"):
        safefile.decode(data, "f")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(value):
    data = safefile.encode({"a": np.array([1.0, value], np.float32)}, {})
    with pytest.raises(DeltaError, match="NaN or infinity"):
        safefile.decode(data, "f")


def framed(header: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + body


ENTRY = '"__metadata__":{"bitfit":"{}"}'


def described(shape: str, offsets: str, dtype: str = '"F32"', more: str = "") -> str:
    """A header with one array `a` as given."""
    return (
        "{" + ENTRY + ',"a":{"dtype":' + dtype + ',"shape":' + shape + ',"data_offsets":' + offsets + "}" + more + "}"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"x" * 64,
        struct.pack("<Q", 99) + b"{}",
        framed("[]"),
        framed("{}"),
        framed("not json"),
        framed('{"__metadata__":{"bitfit":5}}'),
        framed('{"__metadata__":{"bitfit":"[1]"}}'),
        framed('{"__metadata__":{"bitfit":"{\\"a\\":NaN}"}}'),
        framed("{" + ENTRY + ',"a":{},"a":{}}'),
        framed(described("[-1]", "[0,4]"), b"0000"),
        framed(described("[1e3]", "[0,4]"), b"0000"),
        framed(described("[999999999999]", "[0,4]"), b"0000"),
        framed(described("[1]", "[0,8]", '"F64"'), b"00000000"),
        framed(described("[1]", "[0,4]", '["F32"]'), b"0000"),
        framed(described("[1]", "[4,8]"), b"00000000"),
        framed(described("[1]", "[0,4]"), b"00000000"),
        framed(described("[1]", "[0,4]", more=',"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'), b"0000"),
        framed(described("[" + "9" * 5000 + "]", "[0,4]"), b"0000"),
        framed("[" * 100_000),
        framed('{"a":' * 5000),
        framed('{"__metadata__":{"bitfit":"' + "[" * 50_000 + '"}}'),
    ],
)  # fmt: skip
def test_malformed_files_are_typed_errors(data):
    with pytest.raises(DeltaError):
        safefile.decode(data, "f")


def test_a_sparse_part_without_its_other_half_is_refused(delta):
    name = next(name for name in delta.tensors if name.endswith(".index"))
    tensors = {n: v for n, v in delta.tensors.items() if n != name}
    with pytest.raises(DeltaError, match="indices and values"):
        Delta.checked(*safefile.decode(rewritten(delta, tensors), "f"), "f")


@pytest.mark.parametrize("index", [[5, 5], [3, 1], [-1, 2], [0, 10**9]])
def test_indices_out_of_order_or_range_never_reach_the_base(delta, base, index):
    before = base.encoder.state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    tensors = {n: v for n, v in delta.tensors.items() if not n.startswith(name)}
    tensors |= {name + ".index": np.array(index), name + ".value": np.zeros(2, np.float32)}
    with pytest.raises(DeltaError, match="not ascending"):
        Delta(tensors, delta.meta).apply(base)
    assert all(torch.equal(before[n], value) for n, value in base.encoder.state_dict().items())


def test_a_wrong_shape_is_refused_before_anything_is_written(delta, base):
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    tensors = {**delta.tensors, "pooler.dense.bias": np.zeros(3, np.float32)}
    with pytest.raises(DeltaError, match="shape"):
        Delta(tensors, delta.meta).apply(base)
    assert all(torch.equal(before[n], value) for n, value in base.encoder.state_dict().items())


def mutations(data: bytes, count: int, seed: int):
    """Damaged copies: cut, flipped, overwritten, repeated, with bytes added or taken out."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        kind, at = draw.integers(6), int(draw.integers(len(data)))
        width = int(draw.integers(1, 64))
        noise = draw.bytes(width)
        if kind == 0:
            yield data[:at]
        elif kind == 1:
            yield data[:at] + bytes([data[at] ^ (1 << int(draw.integers(8)))]) + data[at + 1 :]
        elif kind == 2:
            yield data[:at] + noise + data[at + width :]
        elif kind == 3:
            yield data[:at] + data[at : at + width] + data[at:]
        elif kind == 4:
            yield data[:at] + noise + data[at:]
        else:
            head = int(draw.integers(min(len(data), 4000)))  # most of what is read lies in the header
            yield data[:head] + bytes([int(draw.integers(256))]) + data[head + 1 :]


def refused(data: bytes, original: bytes) -> None:
    if data == original:
        return
    began = time.process_time()
    with pytest.raises(DeltaError):
        Delta.checked(*safefile.decode(data, "f"), "f")
    assert time.process_time() - began < 0.1


def test_300_mutated_files_are_each_a_typed_error(delta):
    data = delta.encode()
    for mutated in mutations(data, 300, seed=1):
        refused(mutated, data)


@pytest.mark.slow
def test_10000_mutated_files_are_each_a_typed_error_and_leave_the_base_alone(delta, base):
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    data = delta.encode()
    for mutated in mutations(data, 10_000, seed=2):
        refused(mutated, data)
    assert all(torch.equal(before[n], value) for n, value in base.encoder.state_dict().items())


ODD = (None, True, -1, 0, 2**70, 1.5, 1e308, "", "x" * 300, "\ud800", [], [[]], {}, {"": None}, ["a", 1])
"""Values that a key of the metadata may be given by a hostile file."""


def altered(table: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """The metadata with one value, at any depth, replaced by an odd one, removed or put under another key."""
    table = copy.deepcopy(table)
    inner = table
    while True:
        key = list(inner)[draw.integers(len(inner))]
        if not isinstance(inner[key], dict) or not inner[key] or draw.random() < 0.3:
            break
        inner = inner[key]
    value = inner.pop(key)
    action = draw.integers(4)
    if action < 2:
        inner[key] = ODD[draw.integers(len(ODD))]
    elif action == 2:
        inner[str(draw.integers(9))] = value
    return table


def check_signed_metadata(delta: Delta, count: int, seed: int) -> int:
    """Decode files with altered, well-signed metadata; how many were refused. Any error but DeltaError gets through."""
    draw = np.random.default_rng(seed)
    refusals = 0
    for _ in range(count):
        data = safefile.encode(dict(delta.tensors), altered(delta.meta.table(), draw))
        try:
            Delta.checked(*safefile.decode(data, "f"), "f").encode()
        except DeltaError as error:
            assert str(error).startswith("f: ") and "\n" not in str(error)
            refusals += 1
    return refusals


def test_well_signed_metadata_of_any_form_loads_or_is_a_typed_error(delta):
    assert 50 < check_signed_metadata(delta, 300, seed=3) < 300


@pytest.mark.slow
def test_10000_well_signed_alterations_load_or_are_a_typed_error(delta):
    assert 1000 < check_signed_metadata(delta, 10_000, seed=4) < 10_000


def test_a_huge_file_is_refused_without_being_read(tmp_path):
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(framed("{" + ENTRY + "}"))
        file.truncate(40 << 30)  # sparse: no disk is used
    with pytest.raises(DeltaError, match="size"):
        Delta.load(path)


def test_a_pipe_is_no_delta(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DeltaError, match="no such file"):
        Delta.load(tmp_path / "pipe")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(delta, path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        delta.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_truly_full_disk_leaves_the_old_file(delta, path):
    # /dev/full answers every write as a full disk does.
    target = path.parent / "link.safetensors"
    target.write_bytes(b"old")
    temporary = path.parent / f".link.safetensors.{files.os.getpid()}.tmp"
    temporary.symlink_to("/dev/full")
    with pytest.raises(WriteError, match="No space left"):
        delta.save(target)
    assert target.read_bytes() == b"old" and not temporary.is_symlink()


@pytest.mark.parametrize(
    ("key", "value"),
    [("labels", ["a", "a"]), ("labels", ["\ud800", "b"]), ("pool", "x"), ("max_length", -1), ("max_length", 10**9)],
)
def test_well_signed_metadata_that_makes_no_sense_is_refused(delta, tmp_path, key, value):
    with pytest.raises(DeltaError):
        Delta.checked(dict(delta.tensors), {**delta.meta.table(), key: value}, "x")
