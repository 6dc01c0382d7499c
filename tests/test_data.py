from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import tracemalloc
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitfit.data import formats, loading, sources, splits
from bitfit.data.columns import find_columns
from bitfit.data.loading import Columns, Examples, load, load_labelled, rows, stream_texts
from bitfit.data.readers.texts import class_name
from bitfit.data.source import DataFile
from bitfit.errors import DataError, UsageError

SHARED = Path(os.environ.get("BITFIT_SHARED", Path(__file__).parents[2] / "shared")) / "data"


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def labelled(path: Path, labels: list[object]) -> Path:
    return jsonl(path, [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)])


def values(path: Path) -> list[dict[str, object]]:
    return [row.values for row in rows(path)]


def note(dataset: loading.Dataset, part: str) -> str:
    return next((n for n in dataset.notes if part in n), "")


def examples(texts: list[str], labels: list[int]) -> Examples:
    return Examples(texts, None, labels, list(range(1, len(texts) + 1)))


# ---------------------------------------------------------------- reading

TWO = [{"text": "a, b", "label": "x"}, {"text": 'say "c"\nd', "label": "y"}]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("extension", "content"),
    [
        (".csv", 'text,label\n"a, b",x\n"say ""c""\nd",y\n'),
        (".jsonl", "".join(json.dumps(row) + "\n" for row in TWO)),
        (".ndjson", "".join(json.dumps(row) + "\r\n" for row in TWO)),
    ],
)
def test_every_text_format_reads_the_same(tmp_path, extension, content, ending):
    assert values(write(tmp_path / f"f{extension}{ending}", content)) == TWO


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_parquet_reads_the_same(tmp_path, ending):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(TWO), tmp_path / "f.parquet")
    path = write(tmp_path / f"g.parquet{ending}", (tmp_path / "f.parquet").read_bytes())
    assert list(rows(path)) == [(1, TWO[0]), (2, TWO[1])]


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [
        ([0.0, None, 1.0, 0.0, 1.0], "classification", ("0", "1")),
        ([Decimal("1.50"), Decimal("2.25"), Decimal("3.00")], "regression", ()),
        ([True, False] * 2, "classification", ("false", "true")),
    ],
)
def test_parquet_labels_keep_their_types(tmp_path, labels, kind, names):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"text {i}" for i in range(len(labels))], "label": labels})
    parquet.write_table(table, tmp_path / "f.parquet")
    dataset = load(tmp_path / "f.parquet")
    assert (dataset.kind, dataset.labels) == (kind, names)


def test_a_parquet_column_twice_is_an_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(DataError, match='more than one column "text"'):
        values(tmp_path / "f.parquet")


def test_a_broken_parquet_file_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a readable Parquet"):
        values(write(tmp_path / "f.parquet", b"PAR1 no"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'needs pyarrow: pip install "bitfit\[parquet\]"'):
        values(write(tmp_path / "f.parquet", b"PAR1"))


def test_a_record_has_the_line_where_it_starts(tmp_path):
    path = write(tmp_path / "f.csv", '\ntext,label\n\n"one\n\ntwo",x\n   \nthree,y\n')
    assert [row.line for row in rows(path)] == [4, 8]


def test_blank_json_lines_are_skipped_and_counted(tmp_path):
    path = write(tmp_path / "f.jsonl", '\n{"text": "a"}\n  \n{"text": "b"}')
    assert [row.line for row in rows(path)] == [2, 4]


@pytest.mark.parametrize("name", ["f.csv", "f.jsonl"])
def test_a_byte_order_mark_is_stripped(tmp_path, name):
    content = "text,label\nä,1\n" if name == "f.csv" else '{"text": "ä", "label": "1"}\n'
    assert values(write(tmp_path / name, content.encode("utf-8-sig"))) == [{"text": "ä", "label": "1"}]


def test_a_cell_may_hold_a_megabyte(tmp_path):
    path = write(tmp_path / "f.csv", f"text,label\n{'x' * 1_000_000},1\n")
    assert len(values(path)[0]["text"]) == 1_000_000


def test_semicolons_separate_when_the_header_has_no_comma(tmp_path):
    assert values(write(tmp_path / "f.csv", "text;label\na,b;1\n")) == [{"text": "a,b", "label": "1"}]
    assert values(write(tmp_path / "g.csv", "text,a;b\nx;y,1\n")) == [{"text": "x;y", "a;b": "1"}]


def test_texts_that_look_missing_are_texts(tmp_path):
    words = ["NA", "None", "null", "nan", "N/A"]
    path = write(tmp_path / "f.csv", "text,label\n" + "".join(f"{w},{i % 2}\n" for i, w in enumerate(words)))
    assert [v["text"] for v in values(path)] == words
    dataset = load(path)
    assert sorted(dataset.train.texts + dataset.dev.texts) == sorted(words)


def test_reading_takes_constant_memory(tmp_path):
    path = write(tmp_path / "f.csv", "text,label\n" + f"{'word ' * 200},1\n" * 8_000)
    tracemalloc.start()
    count = sum(1 for _ in stream_texts(path, Columns("text")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8_000
    assert peak < path.stat().st_size / 4


BAD_FILES = {
    "unknown extension": ("f.dat", b"x", r"no known extension. Known: .csv, .tsv, .jsonl, .ndjson, .parquet"),
    "spreadsheet": ("f.xlsx", b"PK\x03\x04", r"is a spreadsheet; save it as CSV"),
    "PDF": ("f.csv", b"%PDF-1.7\n", r"is a PDF document, not a text file"),
    "zip": ("f.jsonl", b"PK\x03\x04....", r"is a zip archive"),
    "gzip without its name": ("f.csv", gzip.compress(b"text,label\na,1\n"), r"add .gz to its name"),
    "a zip as Parquet": ("f.parquet", b"PK\x03\x04....", r"is a zip archive"),
    "Cyrillic": (
        "f.csv",
        "text,label\nхорошо,1\n".encode("cp1251"),
        r"line 2: byte 0xf5 at byte 1 is not UTF-8",
    ),
    "UTF-8 and cp1252": ("f.csv", "text,label\ncafé,1\n".encode() + b"caf\xe9,1\n", r"line 3: byte 0xe9 .*not UTF-8"),
    "bad encoding after a mark": ("f.csv", b"\xef\xbb\xbfte\xfft\n", r"line 1: byte 0xff at byte 6"),
    "NUL byte": ("f.jsonl", b'{"text": "a"}\n{"text": "a\0"}\n', r"line 2: a NUL byte at byte 12"),
    "too few fields": ("f.csv", "text,label\na,1\nb\n", r"line 3: 2 fields \(text, label\) expected, 1 found"),
    "too many fields": ("f.csv", "text,label\na, b,1\n", r"line 2: 2 fields .* expected, 3 found.*in quotes"),
    "open quote": ("f.csv", 'text,label\na,1\n"b,1\nc,1\n', r"line 3: unexpected end of data.*close every quote"),
    "text after a quote": ("f.csv", 'text,label\n"b" c,1\n', r"line 2: .*expected after"),
    "old Mac line ends": ("f.csv", "text,label\ra,1\r", r"line 1: a carriage return without a line feed"),
    "broken JSON": ("f.jsonl", '{"text": "a"}\n{"text": }\n', r"line 2: invalid JSON at column 10"),
    "JSON that is no object": ("f.jsonl", '["a"]\n', r"line 1: every line must be a JSON object; this one is a list"),
    "half a surrogate": ("f.jsonl", '{"text": "a"}\n{"text": "\\uD800"}\n', r"line 2: half of a surrogate pair"),
    "endless JSON nesting": ("f.jsonl", "[" * 100_000, r"line 1: unusable JSON"),
    "JSON key twice": ("f.jsonl", '{"text": "a", "text": "b"}\n', r"line 1: .*a key occurs twice"),
    "column twice": ("f.csv", "text,label,text\na,1,b\n", r'more than one column "text"'),
    "empty": ("f.csv", "", r"is empty"),
    "empty JSON": ("f.jsonl", "\n\n", r"has no rows"),
    "header only": ("f.tsv", "text\tlabel\n", r"has no rows"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_clear_error(tmp_path, case):
    name, content, message = BAD_FILES[case]
    with pytest.raises(DataError, match=message) as caught:
        values(write(tmp_path / name, content))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_recognised_and_said(tmp_path, encoding):
    lines = [f"the naïve waiter of the café said {i},{i % 2}\n" for i in range(16)]
    text = "text,label\n" + "".join(lines)
    path = write(tmp_path / "f.csv", text.encode(encoding))
    dataset = loading.load(path)
    assert any("naïve waiter of the café" in example for example in dataset.train.texts)
    read_as = "UTF-16" if encoding.startswith("utf") else "cp1252"
    assert note(dataset, f"f.csv is not UTF-8; it was read as {read_as}")


def test_an_encoding_that_is_given_is_used_and_not_guessed(tmp_path):
    path = write(tmp_path / "f.csv", "text,label\nхорошо,1\n".encode("cp1251"))
    file = DataFile(path, "cp1251")
    assert [row.values["text"] for row in rows(file)] == ["хорошо"] and not file.notes
    with pytest.raises(DataError, match=r"not utf-8 text; pass another --encoding"):
        list(rows(DataFile(path, "utf-8")))
    with pytest.raises(UsageError, match="--encoding klingon: not known"):
        list(rows(DataFile(path, "klingon")))


def test_a_json_array_of_records_is_read_as_rows(tmp_path):
    records = [{"text": f"text {i}", "label": "yes" if i % 2 else "no"} for i in range(20)]
    dataset = loading.load(write(tmp_path / "f.json", json.dumps(records, indent=1)))
    assert dataset.kind == "classification" and len(dataset.train) + len(dataset.dev) == 20


@pytest.mark.parametrize("content", ["text\na\nb\n", "text,label\na,\nb,\n", "text,label\na,-1\nb,-1\n"])
def test_a_file_without_labels_says_so_where_labels_are_needed(tmp_path, content):
    path = write(tmp_path / "f.csv", content)
    columns = Columns("text", None, "label" if "label" in content else None)
    with pytest.raises(DataError, match=r"labels are needed here \(bitfit predict works without them\)"):
        load_labelled(path, columns, "classification", ("no", "yes"))


def test_an_escaped_surrogate_pair_is_text(tmp_path):
    assert values(write(tmp_path / "f.jsonl", '{"text": "\\ud83d\\ude00"}\n')) == [{"text": "😀"}]


def test_a_missing_file_suggests_a_near_one(tmp_path):
    write(tmp_path / "reviews.csv", "text,label\n")
    with pytest.raises(DataError, match=r'does not exist. Did you mean "reviews.csv"'):
        values(tmp_path / "review.csv")


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nowhere" / "f.csv")


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"plain text", lambda raw: raw[:-4]])
def test_a_damaged_gzip_file_is_an_error(tmp_path, damage):
    lines = "".join(json.dumps({"text": os.urandom(20).hex()}) + "\n" for _ in range(500))
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(damage(gzip.compress(lines.encode())))
    with pytest.raises(DataError, match="cannot be read to its end"):
        values(path)


def test_a_flipped_bit_in_gzip_is_an_error(tmp_path):
    raw = bytearray(gzip.compress(b'{"text": "a"}\n' * 50))
    raw[-6] ^= 1
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(raw)
    with pytest.raises(DataError, match="CRC check failed"):
        values(path)


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (["idx", "Sentence1", "Sentence2", "Score"], ("Sentence1", "Sentence2", "Score")),
        (["hypothesis", "premise", "gold_label"], ("premise", "hypothesis", "gold_label")),
        (["text", "text_pair", "label"], ("text", "text_pair", "label")),
        (["question", "sentence", "label"], ("question", "sentence", "label")),
        (["query", "passage", "y"], ("query", "passage", "y")),
        (["text_a", "text_b", "label", "guid"], ("text_a", "text_b", "label")),
        (["coarse_label", "fine_label", "label", "text"], ("text", None, "label")),
        (["title", "Review Text", "stars"], ("Review Text", None, "stars")),
        (["target", "id", "comment_text"], ("comment_text", None, "target")),
    ],
)
def test_well_known_names_are_found(tmp_path, header, expected):
    path = write(tmp_path / "f.csv", ",".join(header) + "\n" + ",".join("ab"[i % 2] for i in range(len(header))))
    assert find_columns(path) == Columns(*expected)


def test_unknown_names_are_found_by_their_content(tmp_path):
    lines = [f"{i},{'good' if i % 3 else 'bad'},words number {i} of many" for i in range(30)]
    path = write(tmp_path / "f.csv", "\n".join(["guid,verdict,said", *lines]))
    assert find_columns(path) == Columns("said", None, "verdict")


def test_a_lone_column_of_numbers_is_the_label(tmp_path):
    path = write(tmp_path / "f.csv", "said,relevance\n" + "".join(f"words {i} x,{i / 7}\n" for i in range(30)))
    assert find_columns(path) == Columns("said", None, "relevance")


def test_given_columns_win(tmp_path):
    path = write(tmp_path / "f.csv", "text,label,sentence1,sentence2,kind\na,1,b,c,d\n")
    assert find_columns(path, text="sentence2", label="kind") == Columns("sentence2", None, "kind")
    assert find_columns(path, text_pair="sentence2") == Columns("sentence1", "sentence2", "label")
    assert find_columns(path, text="text", text_pair="kind") == Columns("text", "kind", "label")


def test_an_unknown_column_suggests_the_right_one(tmp_path):
    path = write(tmp_path / "f.csv", "review,label\na,1\n")
    with pytest.raises(DataError, match=r'no column "reviews". Did you mean "review"\? Known: review, label'):
        find_columns(path, text="reviews")


def test_a_column_has_one_role(tmp_path):
    with pytest.raises(DataError, match=r'"text" .* cannot be two of'):
        find_columns(write(tmp_path / "f.csv", "text,label\na,1\n"), text="text", label="text")


def test_no_text_column_is_an_error_that_lists_the_columns(tmp_path):
    with pytest.raises(DataError, match="pass --text with one of: id, n, m"):
        find_columns(write(tmp_path / "f.csv", "id,n,m\n1,2,3\n"))


def test_two_possible_labels_are_an_error_that_lists_the_columns(tmp_path):
    path = write(tmp_path / "f.csv", "text,one,two\n" + "".join(f"words {i},{i % 2},{i % 3}\n" for i in range(12)))
    assert find_columns(path).label is None
    with pytest.raises(DataError, match="pass --label with one of: text, one, two"):
        load(path)


def test_a_file_without_header_is_noticed(tmp_path):
    path = write(tmp_path / "f.csv", "it was good,1\n" + "".join(f"words {i},{i % 2}\n" for i in range(12)))
    with pytest.raises(DataError, match="add a header line"):
        load(path)


def test_the_pandas_index_column_is_neither_text_nor_label(tmp_path):
    path = write(tmp_path / "f.csv", ",said,verdict\n" + "".join(f"{i},words {i},{i % 2}\n" for i in range(8)))
    assert find_columns(path) == Columns("said", None, "verdict")


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([10, 9, 10, 9], ("9", "10")),
        (["10", "9", "b", "9"], ("10", "9", "b")),
        ([True, False, True], ("false", "true")),
        (["pos", " neg", "neg"], ("neg", "pos")),
        (["NA", "None", "NA"], ("NA", "None")),
        ([0.0, 1.0, 1.0], ("0", "1")),
        (["0.0", "1.0", "1"], ("0", "1")),
        (["1.5", "n/a", "1.5"], ("1.5", "n/a")),
    ],
)
def test_words_ints_and_bools_are_classes(tmp_path, labels, expected):
    dataset = load(labelled(tmp_path / "f.jsonl", labels * 2))
    assert (dataset.kind, dataset.labels) == ("classification", expected)
    ids = dict(zip(dataset.train.lines + dataset.dev.lines, dataset.train.labels + dataset.dev.labels, strict=True))
    assert ids[1] == expected.index(class_name(labels[0]))


@pytest.mark.parametrize("labels", [[5.0, 4.75, 0], ["5", "4.75", "0"], ["1e-3", "2", "3"], [i / 1 for i in range(21)]])
def test_float_labels_are_a_regression(tmp_path, labels):
    dataset = load(labelled(tmp_path / "f.jsonl", labels))
    assert (dataset.kind, dataset.labels) == ("regression", ())
    assert sorted(dataset.train.labels + dataset.dev.labels) == sorted(map(float, labels))


def test_whole_floats_are_classes_with_a_note(tmp_path):
    assert note(load(labelled(tmp_path / "f.jsonl", [0.0, 1.0] * 3)), "taken as classes")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "nan", "-inf"])
def test_a_float_label_that_is_not_finite_is_an_error(tmp_path, bad):
    with pytest.raises(DataError, match=r"line 3: label .* is not a finite number"):
        load(labelled(tmp_path / "f.jsonl", [0.5, 1.5, bad, 2.0]))


def test_a_word_among_many_floats_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r'line 61: label "n/a" is not a finite number'):
        load(labelled(tmp_path / "f.jsonl", [*(i / 7 for i in range(60)), "n/a"]))


@pytest.mark.parametrize("label", ["same", 2.5])
def test_one_label_only_is_an_error(tmp_path, label):
    with pytest.raises(DataError, match="every label is"):
        load(labelled(tmp_path / "f.jsonl", [label] * 4))


def test_many_int_classes_are_a_warning(tmp_path):
    assert note(
        load(labelled(tmp_path / "f.jsonl", list(range(51)) * 2)),
        "51 different whole numbers are taken as classes",
    )


def test_a_class_with_one_example_is_kept_in_train(tmp_path):
    dataset = load(labelled(tmp_path / "f.jsonl", ["a"] * 5 + ["b"] * 5 + ["c"]))
    assert note(dataset, "1 of 3 classes have one example, which stays in train: c.")
    assert 11 in dataset.train.lines


def test_a_list_is_not_a_label(tmp_path):
    with pytest.raises(DataError, match="line 1: a list is not a label"):
        load(labelled(tmp_path / "f.jsonl", [["a", "b"], ["c"]]), task="classification")


def test_tokens_are_not_a_text(tmp_path):
    with pytest.raises(DataError, match='line 1: column "text" contains a list'):
        load(jsonl(tmp_path / "f.jsonl", [{"text": ["a"], "label": 1}]))


def test_empty_texts_are_skipped_with_one_warning(tmp_path):
    path = write(tmp_path / "f.csv", "text,label\n" + "a,x\nb,y\nc,x\nd,y\n" + ",x\n  ,y\n" * 4)
    dataset = load(path)
    assert len(dataset.train) + len(dataset.dev) == 4
    warnings = [n for n in dataset.notes if "Skipped" in n]
    assert warnings == ["Skipped 8 rows of f.csv with an empty text (lines 6, 7, 8, 9, 10, ...)."]


def test_missing_labels_are_skipped_with_one_warning(tmp_path):
    dataset = load(labelled(tmp_path / "f.jsonl", [1, None, 0, "", 1, 0]))
    assert note(dataset, "Skipped") == "Skipped 2 rows of f.jsonl with no label (lines 2, 4)."
    assert dataset.labels == ("0", "1")


def test_a_file_without_a_usable_row_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no usable row. Skipped 2 rows"):
        load(write(tmp_path / "f.csv", "text,label\na,\nb,\n"))


def test_conflicting_labels_are_counted(tmp_path):
    records = [{"text": f"t{i}", "label": i % 2} for i in range(6)] + [{"text": "t0", "label": 1}]
    dataset = load(jsonl(tmp_path / "f.jsonl", records))
    assert note(dataset, "1 repeated text has conflicting labels.")
    assert {1, 7} <= set(dataset.train.lines)


# ---------------------------------------------------------------- known labels, streams


def test_labelled_rows_follow_the_known_labels(tmp_path):
    path = write(tmp_path / "f.csv", "text,label\na,1.0\n,1\nb,0\n")
    found, notes = load_labelled(path, Columns("text", None, "label"), "classification", ("0", "1"))
    assert (found.labels, found.lines) == ([1, 0], [2, 4])
    assert notes == ("Skipped 1 row of f.csv with an empty text (line 3).",)


def test_an_unknown_label_is_an_error_with_the_known_ones(tmp_path):
    path = write(tmp_path / "f.csv", "text,label\na,pos\nb,ngative\n")
    with pytest.raises(DataError, match=r'line 3: label "ngative" .* Did you mean "negative"\? Known: negative, pos'):
        load_labelled(path, Columns("text", None, "label"), "classification", ("negative", "pos"))


def test_a_word_where_a_number_is_known_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r'line 2: label "good" is not a finite number'):
        load_labelled(write(tmp_path / "f.csv", "text,label\na,good\n"), Columns("text", None, "label"), "regression")


def test_a_stream_yields_every_row_empty_texts_too(tmp_path):
    path = write(tmp_path / "f.csv", "text,other\na,b\n,c\nd,\n")
    assert list(stream_texts(path, Columns("text", "other"))) == [(2, "a", "b"), (3, "", "c"), (4, "d", "")]
    assert [text for _, text, _ in stream_texts(path, Columns("text"))] == ["a", "", "d"]


def test_a_stream_reads_numbers_and_nulls_as_text(tmp_path):
    path = jsonl(tmp_path / "f.jsonl", [{"text": 4}, {"text": None}, {}, {"text": "a"}])
    assert [text for _, text, _ in stream_texts(path, Columns("text"))] == ["4", "", "", "a"]


def test_a_stream_without_its_column_fails_before_the_first_row(tmp_path):
    with pytest.raises(DataError, match='no column "text"'):
        stream_texts(write(tmp_path / "f.csv", "txet,other\na,b\n"), Columns("text"))


# ---------------------------------------------------------------- folders


def test_a_folder_holds_train_dev_and_test(tmp_path):
    labelled(tmp_path / "train.jsonl", ["a", "b", "a"])
    write(tmp_path / "validation.csv.gz", "text,label\nx,b\n")
    write(tmp_path / "test.tsv", "text\tlabel\ny\ta\nz\tb\n")
    dataset = load(tmp_path)
    assert (len(dataset.train), dataset.dev.labels, dataset.test.labels) == (3, [1], [0, 1])
    assert note(dataset, "validation.csv.gz is taken as dev.")
    assert note(dataset, "3 train, 1 dev and 2 test rows")


def test_a_train_sample_is_train_with_a_note(tmp_path):
    labelled(tmp_path / "train_sample.jsonl.gz", ["a", "b"] * 4)
    assert note(load(tmp_path), "train_sample.jsonl.gz is taken as train.")


def test_a_folder_without_train_lists_what_is_there(tmp_path):
    labelled(tmp_path / "dev.jsonl", ["a", "b"])
    with pytest.raises(DataError, match=r"no train file .* it holds: dev.jsonl"):
        load(tmp_path)


def test_two_train_files_are_an_error(tmp_path):
    labelled(tmp_path / "train.jsonl", ["a", "b"])
    write(tmp_path / "train.csv", "text,label\nx,b\n")
    with pytest.raises(DataError, match="same split of the data"):
        load(tmp_path)


def test_given_dev_and_test_files_win(tmp_path):
    train = labelled(tmp_path / "f.jsonl", ["a", "b"] * 3)
    other = write(tmp_path / "other.csv", "text,label\nx,b\n")
    dataset = load(train, dev=other, test=other)
    assert (len(dataset.train), len(dataset.dev), len(dataset.test)) == (6, 1, 1)


@pytest.mark.parametrize("part", ["dev", "test"])
def test_a_label_that_train_lacks_is_an_error(tmp_path, part):
    labelled(tmp_path / "train.jsonl", ["a", "b"] * 4)
    labelled(tmp_path / f"{part}.jsonl", ["a", "c"])
    with pytest.raises(DataError, match=rf'{part}.jsonl, line 2: label "c" is not in the training data'):
        load(tmp_path)


@pytest.mark.parametrize("content", ["text\nx\n", "text,label\nx,\ny,\n", "text,label\nx,-1\ny,-1\n"])
def test_a_test_file_without_labels_is_ignored_with_a_note(tmp_path, content):
    labelled(tmp_path / "train.jsonl", [0, 1] * 4)
    write(tmp_path / "test.csv", content)
    dataset = load(tmp_path)
    assert dataset.test is None
    assert note(dataset, "test.csv has no labels and is ignored.")


def test_too_few_rows_to_split_are_an_error(tmp_path):
    with pytest.raises(DataError, match="too few different rows"):
        load(labelled(tmp_path / "f.jsonl", ["a", "b"]))


def test_loading_twice_gives_the_same(tmp_path):
    path = labelled(tmp_path / "f.jsonl", [i % 3 for i in range(60)])
    assert load(path, train_size=20, seed=4) == load(path, train_size=20, seed=4)
    assert load(path, seed=4).dev != load(path, seed=5).dev


def test_a_train_size_is_taken_after_dev_is_split_off(tmp_path):
    path = labelled(tmp_path / "f.jsonl", [i % 2 for i in range(100)])
    whole, cut = load(path), load(path, train_size=30)
    assert cut.dev == whole.dev
    assert len(cut.train) == 30
    assert set(cut.train.lines) <= set(whole.train.lines)
    assert note(cut, "30 of 90 training rows")


@pytest.mark.parametrize("size", [91, 0, -1])
def test_an_impossible_train_size_is_an_error(tmp_path, size):
    with pytest.raises(DataError, match="between 1 and the 90 training rows"):
        load(labelled(tmp_path / "f.jsonl", [i % 2 for i in range(100)]), train_size=size)


def test_rows_by_class_are_those_that_were_drawn(tmp_path):
    path = labelled(tmp_path / "f.jsonl", [i % 2 for i in range(100)])
    assert note(load(path, train_size=30), 'Rows by class: "0" 15, "1" 15.')
    assert note(load(path), 'Rows by class: "0" 50, "1" 50.')


def test_a_train_size_that_loses_a_class_says_so(tmp_path):
    path = labelled(tmp_path / "f.jsonl", ["a", "b"] * 30 + ["c"])
    assert note(load(path, train_size=2), "1 of 3 classes have no example among them.")


# ---------------------------------------------------------------- properties

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
labels_of_many = st.lists(st.integers(0, 4), min_size=1, max_size=120)
seeds = st.integers(0, 5)


@many
@given(labels_of_many, seeds)
def test_a_split_of_different_texts_is_disjoint_complete_and_stratified(labels, seed):
    train, dev = splits.split(examples([str(i) for i in range(len(labels))], labels), "classification", seed)
    assert sorted(train + dev) == list(range(len(labels)))
    held_out = Counter(labels[i] for i in dev)
    for label, size in Counter(labels).items():
        assert held_out[label] == (max(1, round(size / 10)) if size > 1 else 0)


@many
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2)), min_size=1, max_size=60), seeds)
def test_equal_texts_stay_on_one_side_and_every_class_stays_in_train(drawn, seed):
    texts, labels = [text for text, _ in drawn], [label for _, label in drawn]
    train, dev = splits.split(examples(texts, labels), "classification", seed)
    assert not {texts[i] for i in train} & {texts[i] for i in dev}
    assert {labels[i] for i in train} == set(labels)


def test_texts_with_different_pairs_are_different():
    found = Examples(["a"] * 40, [str(i) for i in range(40)], [0, 1] * 20, list(range(40)))
    assert len(splits.split(found, "classification", 0)[1]) == 4


def test_a_large_split_holds_about_two_thousand():
    found = examples([str(i) for i in range(30_000)], [i % 3 for i in range(30_000)])
    assert len(splits.split(found, "classification", 0)[1]) in range(1998, 2003)


@many
@given(labels_of_many, seeds, st.data())
def test_a_subset_is_exact_stratified_nested_and_repeatable(labels, seed, draw):
    found = examples([str(i) for i in range(len(labels))], labels)
    large = draw.draw(st.integers(1, len(labels)))
    small = draw.draw(st.integers(1, large))
    taken = splits.subset(found, "classification", large, seed)
    assert len(set(taken)) == len(taken) == large
    assert set(splits.subset(found, "classification", small, seed)) <= set(taken)
    assert taken == splits.subset(found, "classification", large, seed)
    counts = Counter(labels[i] for i in taken)
    assert all(abs(counts[k] - large * size / len(labels)) < 1 for k, size in Counter(labels).items())


@many
@given(st.integers(2, 200), seeds)
def test_a_regression_split_is_a_tenth(size, seed):
    found = Examples([str(i) for i in range(size)], None, [i / 7 for i in range(size)], list(range(size)))
    train, dev = splits.split(found, "regression", seed)
    assert sorted(train + dev) == list(range(size))
    assert len(dev) == max(1, round(size / 10))


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(st.tuples(cells, cells), min_size=1, max_size=8))
def test_what_the_csv_module_writes_is_read_back(tmp_path, drawn):
    path = tmp_path / "f.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *drawn])
    assert [tuple(v.values()) for v in values(path)] == drawn


# ---------------------------------------------------------------- real sets

REAL = {
    "cola": (Columns("sentence", None, "label"), 2, 8551),
    "sst2": (Columns("sentence", None, "label"), 2, 67349),
    "mrpc": (Columns("sentence1", "sentence2", "label"), 2, 3668),
    "rte": (Columns("sentence1", "sentence2", "label"), 2, 2490),
    "stsb": (Columns("sentence1", "sentence2", "label"), 0, 5749),
    "qnli": (Columns("question", "sentence", "label"), 2, None),
    "mnli": (Columns("premise", "hypothesis", "label"), 3, None),
    "qqp": (Columns("question1", "question2", "label"), 2, None),
    "imdb": (Columns("text", None, "label"), 2, 23000),
    "rotten_tomatoes": (Columns("text", None, "label"), 2, 8530),
    "trec": (Columns("text", None, "label"), 6, None),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_set_loads_as_it_is(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {name} under {SHARED}; set BITFIT_SHARED to the folder that holds data/")
    columns, classes, size = REAL[name]
    dataset = load(SHARED / name)
    assert (dataset.columns, len(dataset.labels)) == (columns, classes)
    assert dataset.kind == ("classification" if classes else "regression")
    assert size in (None, len(dataset.train))
    assert len(dataset.dev) > 0


def test_quotes_in_a_tsv_are_characters(tmp_path):
    path = tmp_path / "q.tsv"
    path.write_text('text\tlabel\n"Hello there\t1\nfoo bar"\t0\n"The" movie\t1\n"all ""quoted"""\t0\n')
    found = [row.values["text"] for row in rows(path)]
    assert found == ['"Hello there', 'foo bar"', '"The" movie', 'all "quoted"']


@pytest.mark.parametrize("header", ["text;label, really;note", "text\tlabel", "text|label", "sep=;\ntext;label"])
def test_the_delimiter_is_the_one_the_header_has_most_of(tmp_path, header):
    delimiter = next(sign for sign in ";\t|" if sign in header)
    path = write(tmp_path / "a.csv", f"{header}\na, b{delimiter}yes" + f"{delimiter}x\n" * ("note" in header))
    assert list(values(path)[0].values())[:2] == ["a, b", "yes"]


def test_decimal_commas_are_an_error_that_shows_the_point(tmp_path):
    path = write(tmp_path / "a.csv", "text;rating\n" + "".join(f"text {i};{i},75\n" for i in range(30)))
    with pytest.raises(DataError, match=r"line 2.*\"0,75\" has a decimal comma; write 0.75"):
        loading.load(path)


def test_a_constant_column_is_no_rival_of_a_numeric_label(tmp_path):
    rows = "".join(f"the film number {i},True,{i / 7:.3f}\n" for i in range(40))
    path = write(tmp_path / "a.csv", "review_text,verified,sentiment_score\n" + rows)
    assert find_columns(path).label == "sentiment_score"


def test_labels_that_differ_by_case_alone_are_noted(tmp_path):
    dataset = loading.load(labelled(tmp_path / "a.jsonl", ["Yes", "yes", "no"] * 10))
    assert "Yes and yes" in note(dataset, "differ only in case")


# ---------------------------------------------------------------- a file is opened once for its head, once for its rows


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are read, each time one is."""
    names = []
    for extension in (".csv", ".jsonl"):
        reader = formats.READERS[extension]
        monkeypatch.setitem(formats.READERS, extension, lambda path, read=reader: names.append(path.name) or read(path))
    return names


def test_the_head_of_a_labelled_file_is_read_once(tmp_path, opened):
    write(tmp_path / "train.csv", "text,label\n" + "".join(f"words {i},{i % 2}\n" for i in range(12)))
    write(tmp_path / "dev.csv", "text,label\na,1\nb,0\n")
    write(tmp_path / "test.csv", "text,label\nc,1\nd,0\n")
    sources.load(tmp_path)
    assert opened == ["train.csv", "train.csv", "dev.csv", "dev.csv", "test.csv", "test.csv"]


def test_the_head_of_a_file_with_several_label_columns_is_read_once(tmp_path, opened):
    path = write(tmp_path / "f.csv", "text,a,b\n" + "".join(f"words {i},{i % 2},{i % 3 % 2}\n" for i in range(12)))
    sources.load(path, label="a,b")
    assert opened == ["f.csv", "f.csv"]
