"""The command line: names, exit codes, one-line errors and the JSON contract."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bitfit.cli.commands import default_out
from bitfit.cli.main import run
from support import reviews


@pytest.fixture
def delta_file(base, csv_file, tmp_path):
    from bitfit import train

    train(csv_file, base, lr=1e-2, epochs=1, out=tmp_path / "d.safetensors")
    return tmp_path / "d.safetensors"


@pytest.fixture
def folder(folders):
    return str(folders("bert"))


def test_train_json_keeps_its_contract(folder, csv_file, tmp_path, capsys):
    out = tmp_path / "d.safetensors"
    words = [
        "train",
        str(csv_file),
        "--base",
        folder,
        "--lr",
        "1e-2,1e-3",
        "--epochs",
        "1",
        "--out",
        str(out),
        "--json",
    ]
    assert run(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) >= {
        "delta", "base", "task", "select", "head", "lr", "batch", "seed", "epochs", "trained", "metric", "dev", "test",
        "trials", "seconds", "threads",
    }  # fmt: skip
    assert [set(trial) for trial in shown["trials"]] == [{"lr", "batch", "seed", "dev", "status"}] * 2
    assert shown["test"] is None and 0 <= shown["dev"]["accuracy"] <= 1 and out.is_file()


def test_train_says_what_it_took_and_where_it_wrote(folder, csv_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(csv_file), "--base", folder, "--lr", "1e-2", "--epochs", "1"]) == 0
    shown = capsys.readouterr()
    assert 'text is column "text"' in shown.err and "reviews.safetensors" in shown.out
    assert (tmp_path / "reviews.safetensors").is_file()


def test_default_names_follow_the_data(tmp_path):
    (tmp_path / "a.b.csv.gz").touch()
    assert default_out(str(tmp_path / "a.b.csv.gz")).name == "a.b.safetensors"
    assert default_out(str(tmp_path)).name == tmp_path.name + ".safetensors"


def test_predict_prints_a_line_per_text(delta_file, folder, capsys):
    assert run(["predict", str(delta_file), "good", "bad film", "--base", folder]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(["predict", str(delta_file), "good", "--base", folder, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"label", "score", "scores"}


def test_predict_writes_a_csv_with_a_row_per_row(delta_file, folder, csv_file, tmp_path):
    import csv

    out = tmp_path / "answers.csv"
    assert run(["predict", str(delta_file), "--file", str(csv_file), "--out", str(out), "--base", folder]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 64 and list(rows[0]) == [
        "text",
        "label",
        "predicted_label",
        "score",
        "p(negative)",
        "p(positive)",
    ]


def test_evaluate_json_keeps_its_contract(delta_file, folder, csv_file, capsys):
    assert run(["evaluate", str(delta_file), str(csv_file), "--base", folder, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"rows", "metrics", "interval", "positive", "by_class", "confusion", "wrong"}
    assert shown["rows"] == 64 == sum(map(sum, shown["confusion"]))
    low, high = shown["interval"]["accuracy"]
    assert low <= shown["metrics"]["accuracy"] <= high


def test_inspect_json_keeps_its_contract(delta_file, capsys):
    assert run(["inspect", str(delta_file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) >= {
        "base", "fingerprint", "select", "head", "task", "labels", "metrics", "bytes", "change",
    }  # fmt: skip
    assert shown["bytes"] == delta_file.stat().st_size and len(shown["change"]["b_q"]) == 2


def test_inspect_shows_and_plots_the_change_map(delta_file, tmp_path, capsys):
    assert run(["inspect", str(delta_file), "--plot", str(tmp_path / "map.svg")]) == 0
    shown = capsys.readouterr().out
    assert "b_LN1" in shown and "rate 0.01, batch 8, seed 0" in shown
    assert (tmp_path / "map.svg").read_text().startswith("<svg")


def test_count_json_keeps_its_contract(folder, capsys):
    assert run(["count", folder, "--json", "--select", "b_q", "--names"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) >= {"base", "total", "trained", "percent", "terms", "head"}
    assert shown["terms"]["b_q"] == {"total": 32, "trained": 32} and shown["terms"]["b_k"]["trained"] == 0
    assert ["b_q", "encoder.layer.*.attention.self.query.bias"] in shown["names"]


SHAPES = {
    "base-cased": {"vocab_size": 28996},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}


@pytest.mark.parametrize(
    ("shape", "head", "total", "trained"),
    [
        ("tiny", "full", 4_386_178, 3_330),
        ("tiny", "bias", 4_386_178, 3_074),
        ("base-cased", "full", 108_311_810, 104_450),
    ],
)
def test_count_on_a_bare_config_reproduces_the_papers_numbers(shape, head, total, trained, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", **SHAPES[shape]}))
    assert run(["count", str(path), "--head", head, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["total"], shown["trained"]) == (total, trained)
    assert bool(shown["warnings"]) == (head == "bias")


def test_count_takes_a_folder_with_a_config_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **SHAPES["tiny"]}))
    assert run(["count", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained"] == 3_330


def test_count_refuses_a_config_that_builds_no_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 10}))
    assert run(["count", str(tmp_path / "config.json")]) == 4


def test_count_warns_of_a_random_head_that_stays_frozen(folder, capsys):
    assert run(["count", folder, "--head", "frozen"]) == 0
    assert "randomly initialised" in capsys.readouterr().err


def test_export_writes_a_folder(delta_file, folder, tmp_path, capsys):
    assert run(["export", str(delta_file), "--out", str(tmp_path / "x"), "--base", folder]) == 0
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "x").iterdir()}


def test_doctor_answers(capsys):
    assert run(["doctor", "--json"]) == 0
    assert "torch" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["fly"], 2, 'bitfit has no command "fly"'),
        (["trian", "x.csv"], 2, 'Did you mean "train"? (bitfit --help)'),
        (["study", "rnu"], 2, 'bitfit study has no command "rnu". Did you mean "run"? (bitfit study --help)'),
        (["train"], 2, "DATA"),
        (["train", "x.csv", "--lr", "fast"], 2, "--lr fast: expected numbers, comma-separated (bitfit train --help)"),
        (["train", "x.csv", "--batch", "8,9.5"], 2, "--batch 8,9.5: expected whole numbers, comma-separated"),
        (["train", "x.csv", "--epochs", "two"], 2, "--epochs two: expected a whole number"),
        (["train", "x.csv", "--head", "ful"], 2, '--head ful: not a choice. Did you mean "full"?'),
        (["serve", "x", "--port", "http"], 2, "--port http: expected a whole number (bitfit serve --help)"),
        (["study", "run", "x", "--seeds", "0"], 2, "--seeds 0: expected a whole number of at least 1"),
        (["study", "run", "x", "--lr", "papr"], 2, "--lr papr: expected paper, auto, or numbers, comma-separated"),
        (["study", "run", "x", "--metods", "a"], 2, "Did you mean --methods? (bitfit study run --help)"),
        (["train", "x.csv", "--epoch", "3"], 2, "no option --epoch. Did you mean --epochs? (bitfit train --help)"),
        (["train", "--epoch=3"], 2, "no option --epoch."),
        (["--vrsion"], 2, "no option --vrsion. Did you mean --version? (bitfit --help)"),
        (["train", "x.csv", "--epochs", "0"], 2, "--epochs"),
        (["train", "x.csv", "--select", "b_m4"], 2, "character 1"),
        (["train", "x.csv", "--base", "{folder}"], 3, "x.csv"),
        (["train", "{csv}", "--base", "/no/such/folder"], 4, "no such model folder"),
        (["train", "{csv}", "--label", "labl", "--base", "{folder}"], 3, 'Did you mean "label"'),
        (
            ["train", "{csv}", "--base", "{folder}", "--lr", "1e30", "--epochs", "1", "--out", "{tmp}/d.st"],
            5,
            "diverged",
        ),
        (["predict", "{tmp}/none.safetensors", "hi"], 4, "cannot be read"),
        (["predict", "{csv}", "hi"], 4, "not a usable bitfit file"),
        (["predict", "{csv}"], 2, "either texts or --file"),
        (["predict", "{csv}", "hi", "--fle", "x.csv"], 2, "no option --fle. Did you mean --file?"),
        (["count", "{folder}", "more"], 2, "not understood: more (bitfit count --help)"),
        (["train", "{csv}", "--base", "{folder}", "--out", "{tmp}"], 2, "it is a folder"),
        (["train", "{csv}", "--base", "{folder}", "--out", "{csv}/x.safetensors"], 2, "cannot be written"),
        (["train", "{csv}", "--base", "{folder}", "--out", "."], 2, "it is a folder"),
        (["train", "{csv}", "--base", "{folder}", "--select", "b_emb@0"], 2, "selects nothing"),
        (["inspect", "{tmp}"], 4, "it is a folder"),
        (["inspect", "{csv}"], 4, "not a usable bitfit file"),
        (["count", "{csv}"], 4, "not a model configuration"),
        (["count", "{folder}", "--select", "b_q@7"], 2, "layer"),
        (["evaluate", "{csv}", "{csv}"], 4, "not a usable"),
    ],
)
def test_errors_are_one_line_with_the_right_code(words, code, says, folder, csv_file, tmp_path, capsys):
    words = [word.format(folder=folder, csv=csv_file, tmp=tmp_path) for word in words]
    assert run(words) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bitfit: ")]
    assert len(lines) == 1 and says in lines[0]


def test_a_text_may_look_like_an_option_behind_two_dashes_or_with_a_space(delta_file, folder, capsys):
    assert run(["predict", str(delta_file), "--base", folder, "--", "--good film"]) == 0
    assert run(["predict", str(delta_file), "--base", folder, "-- good film"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("command", ["train", "serve"])
def test_options_are_in_groups(command):
    from dataclasses import fields

    from bitfit.cli import options
    from bitfit.serve.settings import Settings
    from bitfit.training.plan import Plan

    groups, values = {"train": (options.TRAIN_GROUPS, Plan), "serve": (options.SERVE_GROUPS, Settings)}[command]
    grouped = [name for names in groups.values() for name in names]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= {field.name for field in fields(values)}
    text = options.parser().commands[command].format_help()
    assert all(f"\n{title}:\n" in text for title in groups)


@pytest.mark.parametrize("words", [["--methods", "BitFit,Full"], ["--method", "BitFit", "--methods", "Full"]])
def test_methods_are_given_with_commas_or_again_and_again(words):
    from bitfit.cli.options import parse
    from bitfit.cli.study import chosen_methods
    from bitfit.study import spec

    study = spec.load("plus-figure7")
    given = parse(["study", "run", "plus-figure7", *words]).methods
    assert chosen_methods(study, given) == ("BitFit", "Full")
    pair = "b_m2, b_q"
    assert chosen_methods(study, [pair, "BitFit"]) == (pair, "BitFit")
    assert chosen_methods(study, [f"BitFit,{pair}"]) == ("BitFit", pair)
    assert chosen_methods(study, [f"{pair}, BitFit,"]) == (pair, "BitFit")
    assert chosen_methods(study, ["BitFit,b_m2+b_q"]) == ("BitFit", pair)  # as `compare` spells it
    assert chosen_methods(study, ["b_m2,Bitfit"]) == ("b_m2", "Bitfit")  # unknown: refused with a suggestion


def test_an_unknown_method_shows_the_known_names_in_quotes():
    from bitfit.errors import suggest

    assert 'Known: "b_m2, b_q", "BitFit".' in suggest("b_m2", ["b_m2, b_q", "BitFit"])


def test_study_show_leaves_out_what_is_empty(capsys):
    assert run(["study", "show", "core"]) == 0
    shown = capsys.readouterr().out
    assert "covers" not in shown and "Scores (published)" not in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
class TestFullDisk:
    """A file that cannot be written is exit code 1."""

    def test_a_csv(self, delta_file, folder, csv_file, capsys):
        words = ["predict", str(delta_file), "--file", str(csv_file), "--out", "/dev/full", "--base", folder]
        assert run(words) == 1
        assert "/dev/full: cannot be written (No space left on device)" in capsys.readouterr().err

    def test_a_plot(self, delta_file):
        assert run(["inspect", str(delta_file), "--plot", "/dev/full"]) == 1

    def test_a_delta(self, folder, csv_file, tmp_path, monkeypatch, capsys):
        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("bitfit.files.os.fsync", full)
        out = tmp_path / "d.safetensors"
        words = ["train", str(csv_file), "--base", folder, "--lr", "1e-2", "--epochs", "1", "--out", str(out)]
        assert run(words) == 1 and not out.exists()
        assert "No space left" in capsys.readouterr().err

    def test_standard_output(self, delta_file):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "bitfit", "inspect", str(delta_file), "--json"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1 and done.stderr == "bitfit: standard output: No space left on device\n"


def test_an_output_follows_a_link_and_keeps_a_pipe(delta_file, tmp_path):
    target, link, pipe = tmp_path / "map.svg", tmp_path / "link.svg", tmp_path / "pipe"
    link.symlink_to(target)
    assert run(["inspect", str(delta_file), "--plot", str(link)]) == 0
    assert link.is_symlink() and target.read_text().startswith("<svg")
    os.mkfifo(pipe)
    reader = subprocess.Popen(["head", "-c", "4", str(pipe)], stdout=subprocess.PIPE)
    run(["inspect", str(delta_file), "--plot", str(pipe)])
    assert reader.communicate()[0] == b"<svg" and pipe.is_fifo()


def test_studies_can_be_imported_without_fcntl():
    script = "import sys; sys.modules['fcntl'] = None; import bitfit.cli.study, bitfit.study.store"
    subprocess.run([sys.executable, "-c", script], check=True)


def documented_commands():
    """Every `bitfit ...` line in a code block of the README and of docs/."""
    root = Path(__file__).parents[1]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.S | re.M):
            for line in block.splitlines():
                if command := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )?bitfit (.*)", line):
                    yield pytest.param(shlex.split(command[1], comments=True), id=f"{page.name}: {command[1][:40]}")


@pytest.mark.parametrize("words", list(documented_commands()))
def test_commands_in_the_docs_are_understood(words):
    from bitfit.cli.options import parse

    assert parse(words).command == words[0]


def test_nothing_at_all_shows_the_help(capsys):
    assert run([]) == 2
    assert "train" in capsys.readouterr().out


HEAVY = {"torch", "transformers", "matplotlib", "scipy", "sklearn"}


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], HEAVY | {"numpy", "msgspec", "rich", "importlib.metadata"}),
        (["train", "--help"], HEAVY | {"numpy", "msgspec", "rich", "importlib.metadata"}),
        (["inspect", "{delta}"], HEAVY),
    ],
)
def test_help_and_inspect_import_nothing_heavy(words, heavy, delta_file):
    script = (
        "import sys; from bitfit.cli import main\n"
        "try: main.run(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"assert not {heavy} & set(sys.modules)\n"
    )
    words = [word.format(delta=delta_file) for word in words]
    subprocess.run([sys.executable, "-c", script, *words], check=True, capture_output=True)


def test_a_closed_pipe_is_no_error(delta_file, folder, csv_file):
    command = f"{sys.executable} -m bitfit predict {delta_file} --file {csv_file} --base {folder} | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_ctrl_c_exits_130_and_the_same_command_resumes(folder, tmp_path):
    import signal
    import time

    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "".join(f"{t},{label}\n" for t, label in reviews(400)))
    out = tmp_path / "d.safetensors"
    command = [sys.executable, "-m", "bitfit", "train", str(path), "--base", folder, "--lr", "1e-3", "--epochs", "6"]
    command += ["--out", str(out), "--resume"]
    environment = {**os.environ, "BITFIT_CHECKPOINT_SECONDS": "0.05"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    while not list(tmp_path.glob("d.run/*.checkpoint")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in errors and not out.exists()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and " since it was resumed" in done.stdout
    assert out.exists()


def test_injection_runs_through_every_command(folders, csv_file, tmp_path, capsys):
    folder, out = str(folders("llama")), str(tmp_path / "d.safetensors")

    def output(*words):
        assert run(list(words)) == 0
        return capsys.readouterr().out

    assert json.loads(output("count", folder, "--inject", "b_v", "--json"))["terms"]["b_v"]["trained"] == 16
    options = ("--inject", "b_v", "--lr", "1e-2", "--epochs", "1", "--out", out, "--json")
    assert json.loads(output("train", str(csv_file), "--base", folder, *options))["trained"] == 16 + 2 * 16
    shown = json.loads(output("inspect", out, "--json"))
    assert shown["inject"] == "b_v" and list(shown["change"]) == ["b_v"]
    assert re.search(r"inject\s.*b_v", output("inspect", out))
    assert json.loads(output("evaluate", out, str(csv_file), "--base", folder, "--json"))["rows"] == 64
    assert json.loads(output("predict", out, "good film", "--base", folder, "--json"))["label"]
    assert output("predict", out, "--base", folder, "good film", "--json") == output(
        "predict", out, "good film", "--json", "--base", folder
    )
    assert "config.json" in output("export", out, "--base", folder, "--out", str(tmp_path / "model"))
    assert run(["train", str(csv_file), "--base", folder, "--inject", "b_x"]) == 2
    assert run(["export", out, "--base", folder, "--out", str(tmp_path / "folded"), "--fold"]) == 2
    assert "rotary" in capsys.readouterr().err and not (tmp_path / "folded").exists()


def test_export_folds_on_request(folder, delta_file, tmp_path, capsys):
    assert run(["export", str(delta_file), "--base", folder, "--out", str(tmp_path / "m"), "--fold"]) == 0
    assert "folded" in (tmp_path / "m" / "README.md").read_text()


@pytest.mark.parametrize("what", ["train", "predict", "inspect"])
def test_an_output_never_replaces_its_input(what, delta_file, folder, csv_file, capsys):
    before = csv_file.read_bytes(), delta_file.read_bytes()
    words = {
        "train": ["train", str(csv_file), "--base", folder, "--out", str(csv_file)],
        "predict": ["predict", str(delta_file), "--base", folder, "--file", str(csv_file), "--out", str(csv_file)],
        "inspect": ["inspect", str(delta_file), "--plot", str(delta_file)],
    }
    assert run(words[what]) == 2 and "is the input" in capsys.readouterr().err
    assert (csv_file.read_bytes(), delta_file.read_bytes()) == before


@pytest.mark.parametrize("command", ["count", "train"])
def test_code_that_a_base_brings_never_runs(command, folders, csv_file, tmp_path, monkeypatch, capsys):
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (remote / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    words = {"count": ["count", "remote"], "train": ["train", str(csv_file), "--base", "remote"]}
    assert run(words[command]) == 4 and not (tmp_path / "ran").exists()


def test_a_misspelt_folder_never_asks_the_hub(csv_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bases").mkdir()
    assert run(["train", str(csv_file), "--base", "bases/nosuch"]) == 4
    assert "no such model folder" in capsys.readouterr().err


def test_train_says_which_of_several_trials_it_wrote(folder, csv_file, tmp_path, capsys):
    words = ["train", str(csv_file), "--base", folder, "--lr", "1e-3,1e-2", "--epochs", "1"]
    assert run([*words, "--out", str(tmp_path / "several.safetensors")]) == 0
    written = re.search("the best is written: (rate .*)", capsys.readouterr().out)
    assert run(["inspect", str(tmp_path / "several.safetensors")]) == 0
    assert written and written[1] in capsys.readouterr().out


def test_count_takes_the_base_as_other_commands_do(folder, capsys):
    assert run(["count", "--base", folder]) == 0
    shown = capsys.readouterr().out
    assert run(["count", folder]) == 0 and capsys.readouterr().out == shown
    assert run(["count", folder, "--base", folder]) == 2 and "given twice" in capsys.readouterr().err


def test_count_warns_of_an_empty_selection(folder, capsys):
    assert run(["count", folder, "--select", "b_q - b_q"]) == 0
    assert "is empty on this base" in capsys.readouterr().err


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "none.csv"]) == 3
    assert "none.csv" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
