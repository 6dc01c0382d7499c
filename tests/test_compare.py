"""Comparing methods: one budget for all, rows that no choice has seen, paired differences, and what is advised."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_type_hints

import pytest

import bitfit
from bitfit.cli.main import run as run_command
from bitfit.data.examples import Columns, Dataset, Examples
from bitfit.errors import DataError, Interrupted, UsageError
from bitfit.report.comparison import _percent, _points, _possible, judge
from bitfit.study import compare as module
from bitfit.study import forecast
from bitfit.study.compare import Contest, Contestant, prepare_data
from bitfit.study.examples import Rows
from bitfit.study.methods import (
    METHODS,
    CompareOptions,
    ComparePlan,
    Extent,
    duration,
    fit_extent,
    full_extent,
    method_names,
    spaced_rates,
)
from bitfit.study.passes import perform_on
from bitfit.study.spec import Method
from bitfit.study.store import Result, Results
from bitfit.training.checkpoint import Store
from support import reviews

QUICK = {"seeds": 2, "rates": 2, "epochs": 1}


def dataset(count=80, test=None):
    rows = reviews(count)
    labels = ("negative", "positive")
    examples = Examples(
        [text for text, _ in rows], None, [labels.index(label) for _, label in rows], list(range(count))
    )
    train, dev = examples.take(range(count - 10)), examples.take(range(count - 10, count))
    return Dataset(train, dev, test, "classification", labels, Columns("text", None, "label"), (), held_out=True)


# ---- a whole run


@pytest.fixture(scope="module")
def compared(bases, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    methods = "bitfit, b_m2+b_q, lora, adapters, head, full"
    return bitfit.compare(reviews_by_column(), bases("bert"), methods=methods, out=out, **QUICK), out


def reviews_by_column(count=80):
    rows = reviews(count)
    return [text for text, _ in rows], [label for _, label in rows]


def test_every_method_gets_a_score_and_all_costs(compared):
    found, _ = compared
    assert [line.name for line in found.lines] == ["bitfit", "b_m2+b_q", "lora", "adapters", "head", "full"]
    for line in found.lines:
        assert len(line.scores) == 2
        assert -100 <= line.interval[0] <= line.score <= line.interval[1] <= 100
        assert line.bytes > 0 and line.seconds > 0 and line.predict > 0 and line.mixed > 0


def test_every_method_but_the_reference_has_a_paired_difference(compared):
    found, _ = compared
    assert found.reference == "bitfit"
    assert [line.name for line in found.lines if line.difference is None] == ["bitfit"]
    full = found.line("full")
    assert full.difference == pytest.approx(full.score - found.line("bitfit").score)


def test_what_trains_is_counted_without_the_head(compared):
    found, _ = compared
    assert found.line("head").trained == 0 < found.line("b_m2+b_q").trained < found.line("bitfit").trained
    assert found.line("full").share == 1.0


def test_all_methods_try_rates_on_the_first_seed_until_the_best_is_within_or_twice_more(compared):
    found, _ = compared
    for one in found.contest.contestants:
        if one.method.name == "head":
            assert len(one.searched) == 1 and one.rate is None  # it is solved
            continue
        assert 3 <= len(one.searched) <= 4  # one of two rates is at an edge
        assert len(one.searched) == 4 or not one.at_edge
        assert {result.trial["seed"] for result in one.searched} == {0}
        assert [result.trial["seed"] for result in one.chosen] == [0, 1]
        assert len({result.trial["epochs"] for result in (*one.searched, *one.chosen)}) == 1


def test_the_page_names_every_method_and_the_advice(compared):
    found, out = compared
    page = (out / "compare.html").read_text()
    assert found.advice.method in page
    for line in found.lines:
        assert line.name in page
        assert line.name.replace("_", "\\_") in (out / "compare.md").read_text()
    written = json.loads((out / "compare.json").read_text())
    assert written["advice"]["text"] == found.advice.text
    assert written["rows"] == found.contest.rows and written["seeds"] == 2


def test_the_same_call_trains_nothing_again(compared, base, monkeypatch):
    found, out = compared
    monkeypatch.setattr(module, "perform_on", lambda *_: pytest.fail("trained again"))
    names = [line.name for line in found.lines]
    again = bitfit.compare(reviews_by_column(), base, methods=names, out=out, **QUICK)
    assert again.lines == found.lines


def test_a_stopped_comparison_goes_on_to_the_same_scores(base, tmp_path):
    options = {"methods": "bitfit,layernorm", **QUICK}
    whole = bitfit.compare(reviews_by_column(), base, **options)
    passes = set()

    def stop_in_second_pass(part, step, total, runners):
        passes.add(part)
        if len(passes) == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted, match="the same command continues"):
        bitfit.compare(reviews_by_column(), base, out=tmp_path, watch=stop_in_second_pass, **options)
    resumed = bitfit.compare(reviews_by_column(), base, out=tmp_path, **options)
    assert [line.scores for line in resumed.lines] == [line.scores for line in whole.lines]


def test_methods_share_passes_and_on_the_second_seed_each_trains_alone(base, monkeypatch):
    passes = []

    def perform(job, work, watch, gap):
        passes.append((work.points[0].seed, [point.method for point in work.points]))
        return perform_on(job, work, watch, gap)

    monkeypatch.setattr(module, "perform_on", perform)
    names = ["layernorm", "lora"]
    bitfit.compare(reviews_by_column(), base, methods=names, seeds=3, rates=1, epochs=1)
    assert [sorted(methods) for seed, methods in passes if seed != 1] == [sorted(names)] * 2
    assert sorted(methods for seed, methods in passes if seed == 1) == sorted([name] for name in names)


def test_methods_that_are_equal_share_their_trials(base, monkeypatch):
    trials = []

    def perform(job, work, watch, gap):
        trials.extend(work.trials)
        return perform_on(job, work, watch, gap)

    monkeypatch.setattr(module, "perform_on", perform)
    found = bitfit.compare(reviews_by_column(), base, methods=["bitfit", "bias"], seeds=2, rates=1, epochs=1)
    assert len(trials) == 2 and found.line("bitfit").scores == found.line("bias").scores


def test_the_command_prints_a_table_and_writes_the_page(folders, csv_file, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", str(csv_file), "--base", str(folders("bert")), "--methods", "bitfit,head", "--seeds", "1"]
    assert run_command([*words, "--rates", "1", "--epochs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "against bitfit" in printed and "compare.html" in printed
    assert (out / "compare.html").is_file()


def test_the_advised_command_reads_the_data_as_the_comparison_did(base, csv_file):
    options = {"methods": "bitfit,head", "seeds": 1, "rates": 1, "epochs": 1}
    found = bitfit.compare(csv_file, base, text="text", max_length=32, **options)
    assert found.command.startswith(f"bitfit train {csv_file} --text text --max-length 32 --base ")


def test_another_positive_class_is_another_trial(base, csv_file, tmp_path):
    options = {"methods": "bitfit,head", "seeds": 1, "rates": 1, "epochs": 1, "metric": "f1", "out": tmp_path}
    first, second = (bitfit.compare(csv_file, base, positive=label, **options) for label in ("positive", "negative"))
    assert first.contest.contestants[0].chosen[0].key != second.contest.contestants[0].chosen[0].key


def test_grafts_of_other_sizes_are_methods(base):
    plan = ComparePlan(methods="lora(W_q, 2), adapter(4), bitfit")
    lora, adapter, _ = plan.chosen_methods
    assert (lora.select, lora.inject) == ("injected", "lora(W_q, 2)")
    assert (adapter.select, adapter.inject) == ("injected + layernorm", "adapter(4)")
    with pytest.raises(UsageError, match="rank"):
        ComparePlan(methods="lora(W_q, 0),bitfit")


def test_fewer_rows_than_the_maximum_are_all_taken():
    prepared = prepare_data(dataset(80), 80)
    assert len(prepared.train) < 80 and any("not more than the 80" in note for note in prepared.notes)


def test_a_method_that_freezes_or_prunes_is_advised_with_its_rate_and_epochs():
    found = judge(contest({"bitfit": [right(240), right(241)], "autofreeze": [right(340), right(341)]}))
    assert found.command == "bitfit train data.csv --select bias --autofreeze --lr 0.001 --epochs 1"


def test_the_time_of_a_training_counts_what_was_before_a_stop(tmp_path):
    store = Store(tmp_path, "key")
    seconds, cpu = store._began
    store._began = seconds - 1000, cpu - 500  # as if it had run for so long
    store.save(0, 1, {}, {})
    again = Store(tmp_path, "key")
    again.load(0)
    assert again.spent[0] >= 1000 and again.spent[1] >= 500


def test_a_budget_cuts_the_comparison_and_says_so(base, monkeypatch):
    monkeypatch.setattr(module.forecast, "speed", lambda _: 1.0)  # operations per second: nothing fits
    options = {"methods": "bitfit,head", "seeds": 3, "rates": 2, "epochs": 1, "budget": "10m"}
    found = bitfit.compare(reviews_by_column(), base, **options)
    assert (found.contest.extent.seeds, found.contest.extent.rates) == (2, 1)
    assert any("To fit the budget" in note and "2 instead of 3 seeds" in note for note in found.notes)


def test_a_comparison_that_its_budget_ended_trains_no_further_seed_when_repeated(base, monkeypatch, tmp_path):
    monkeypatch.setattr(module.forecast, "speed", lambda _: 1e30)  # everything fits
    monkeypatch.setattr(module._Run, "_is_late", lambda *_: True)  # but takes longer than that
    options = {"methods": "layernorm,head", "seeds": 3, "rates": 1, "epochs": 1, "budget": "10m", "out": tmp_path}
    found = bitfit.compare(reviews_by_column(), base, **options)
    assert found.contest.extent.seeds == 2 and any("The budget ends here: 2" in note for note in found.notes)
    monkeypatch.setattr(module._Run, "_is_late", lambda *_: False)
    again = bitfit.compare(reviews_by_column(), base, **options)
    assert again.lines == found.lines and any("2 instead of 3 seeds" in note for note in again.notes)


@pytest.mark.slow
def test_by_default_every_method_that_the_base_allows_is_compared(bases):
    quick = {"seeds": 1, "rates": 1, "epochs": 2}
    assert {line.name for line in bitfit.compare(reviews_by_column(), bases("bert"), **quick).lines} == set(METHODS)
    found = bitfit.compare(reviews_by_column(), bases("llama"), **quick)  # its layers have no biases
    assert {line.name for line in found.lines} == set(METHODS) - {"bitfit", "b_m2+b_q", "autofreeze"}
    assert any(note.startswith("bitfit is left out: ") for note in found.notes)


def test_data_that_is_wrong_leaves_no_folder(folders, csv_file, tmp_path):
    words = ["compare", str(csv_file), "--base", str(folders("bert")), "--out", str(tmp_path / "out")]
    assert run_command([*words, "--methods", "bitfit,b_zzz"]) == 2
    assert run_command([*words, "--label", "nothing"]) != 0
    assert not (tmp_path / "out").exists()


def test_a_terminal_of_80_columns_holds_the_tables(compared, monkeypatch):
    from rich.console import Console

    from bitfit.cli import show

    console = Console(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(show, "out", console)
    show.comparison(compared[0], Path("compare.html"))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("adapters", "b_m2+b_q"):
        assert sum(line.split()[0] == name for line in lines if line.strip()) == 2  # one line in each table


def test_a_frame_is_compared_and_its_repr_is_short(compared, base):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(dict(zip(("text", "label"), reviews_by_column(), strict=True)))
    found = bitfit.compare(frame, base, methods=["bitfit", "head"], seeds=1, rates=1, epochs=1)
    assert repr(found).startswith("<Comparison on the data of bitfit, head; advised: ")
    assert "<table" in found._repr_html_()
    assert found.command is None


# ---- the rows


def test_without_a_test_file_the_test_rows_are_in_no_other_part():
    found = prepare_data(dataset())
    parts = [set(part.lines) for part in (found.train, found.dev, found.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 80


def test_a_test_file_stays_the_test():
    given = dataset(test=dataset(40).train)
    assert prepare_data(given).test is given.test


def test_without_a_test_file_a_dev_file_is_the_test():
    given = replace(dataset(100), held_out=False)
    found = prepare_data(given)
    assert found.test is given.dev
    assert not set(found.dev.lines) & set(given.dev.lines)


def test_notes_count_the_rows_that_are_compared(base, csv_file):
    """Those of `bitfit train` count a dev split that a comparison does not use."""
    found = bitfit.compare(csv_file, base, methods="bitfit,head", seeds=1, rates=1, epochs=1, train_size=20)
    rows = found.contest.rows
    counted = [note for note in found.notes if note.startswith("There are")]
    assert counted == [f"There are 20 train, {rows['dev']} dev and {rows['test']} test rows."]
    assert not any("split off" in note for note in found.notes)


def test_too_few_rows_are_an_error():
    with pytest.raises(DataError, match="too few to compare"):
        prepare_data(dataset(24))


def test_one_class_is_an_error(base):
    with pytest.raises(DataError, match="class"):
        bitfit.compare((["good film"] * 40, ["positive"] * 40), base, methods="bitfit,head")


# ---- the methods


def test_an_unknown_method_gets_a_suggestion_before_anything_is_trained(base):
    with pytest.raises(UsageError, match=r'no method "lroa"\. Did you mean "lora"'):
        bitfit.compare(reviews_by_column(), base, methods="bitfit,lroa")


@pytest.mark.parametrize("methods", ["bitfit", "bitfit,bitfit", "bitfit,bias +"])
def test_methods_that_cannot_be_compared_are_refused(methods):
    with pytest.raises(UsageError, match="--methods"):
        ComparePlan(methods=methods)


def test_an_unknown_option_gets_a_suggestion(base):
    with pytest.raises(UsageError, match='Did you mean "seeds"'):
        bitfit.compare(reviews_by_column(), base, seed=3)


def test_commas_inside_a_selection_separate_no_methods():
    assert method_names("bitfit, random(all, 0.1%),head") == ["bitfit", "random(all, 0.1%)", "head"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (30, 30)])
def test_a_budget_is_a_duration(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "10 days", "soon"])
def test_a_budget_that_is_no_duration_is_refused(text):
    with pytest.raises(UsageError, match="10m"):
        ComparePlan(budget=text)


@pytest.mark.parametrize(
    ("budget", "extent"),
    [
        (6000, Extent(3, 3, 2, 1000, 400)),
        (5000, Extent(2, 3, 2, 1000, 400)),
        (4000, Extent(2, 3, 0, 1000, 400)),
        (2500, Extent(2, 1, 0, 1000, 400)),
        (1000, Extent(2, 1, 0, 500, 400)),
        (300, Extent(2, 1, 0, 125, 125)),
        (1, Extent(2, 1, 0, 100, 100)),
    ],
)
def test_a_budget_takes_seeds_then_further_rates_then_rates_then_rows(budget, extent):
    most = Extent(3, 3, 2, 1000, 400)
    assert fit_extent(most, budget, lambda it: it.rows * it.trials) == extent


def test_one_rate_is_not_widened():
    assert full_extent(ComparePlan(rates=1), 100, 10).widenings == 0


def test_methods_with_four_and_with_three_default_rates_try_as_many():
    assert spaced_rates((4e-4, 1e-3, 2e-3, 4e-3), 3) == (1.3e-3, 4e-3, 1.2e-2)
    assert spaced_rates((2e-5, 5e-5, 1e-4), 3) == (3.3e-5, 1e-4, 3e-4)
    assert spaced_rates((2e-5, 5e-5, 1e-4), 1) == (1e-4,)


def test_the_options_of_compare_are_the_fields_of_its_plan():
    assert get_type_hints(CompareOptions) == get_type_hints(ComparePlan)


def test_help_names_every_method(capsys):
    with pytest.raises(SystemExit):
        run_command(["compare", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert ", ".join(METHODS) in printed


# ---- the advice, on made-up results


def contest(hits, rows=400):
    """A contest of methods whose test rows are right where `hits` says: name -> one list of rows per seed."""
    contestants = []
    for number, (name, by_seed) in enumerate(hits.items()):
        results = tuple(result(name, seed, right) for seed, right in enumerate(by_seed))
        contestants.append(Contestant(METHODS.get(name, Method(name, "bias", ())), results[:1], results, 10 + number))
    return Contest(
        data="data", source="data.csv", base="base", base_given=None, kind="classification", metric="accuracy",
        rows={"train": 100, "dev": 50, "test": rows}, baseline=0.5, epochs=1, batch=8,
        extent=Extent(len(results), 1, 0, 100, 50), contestants=tuple(contestants), notes=(),
    )  # fmt: skip


def result(name, seed, right):
    score = sum(right) / len(right)
    return Result(
        key=f"{name}{seed}", status="done", base="base", task="data", metric="accuracy",
        trial={"lr": 1e-3, "seed": seed}, rows={"train": 100, "dev": 50, "test": len(right)}, majority=0.5,
        scores={"dev": {"accuracy": [score, 0, 1]}, "test": {"accuracy": [score, 0, 1]}}, trained=5, total=100,
        cost={"seconds": 1.0, "cpu": 1.0, "memory": 1e6},
        examples={"test": Rows.of("hits", right, [0] * len(right)).encode()},
    )  # fmt: skip


def right(count, rows=400):
    return [n < count for n in range(rows)]


def test_a_clear_winner_is_advised_and_sure():
    found = judge(contest({"bitfit": [right(240), right(241)], "full": [right(340), right(341)]}))
    assert (found.advice.method, found.advice.sure) == ("full", True)
    assert found.line("full").difference == pytest.approx(25)
    assert "clearly better" in found.markdown()


def test_a_smaller_method_that_costs_at_most_a_point_is_advised():
    many = {"bitfit": [right(3240, 4000)] * 2, "full": [right(3242, 4000)] * 2}
    found = judge(contest(many, 4000))
    assert (found.advice.method, found.advice.sure) == ("bitfit", True)


@pytest.mark.parametrize(("metric", "low"), [("accuracy", 0.0), ("matthews", -100.0), ("r2", -200.0)])
def test_an_interval_has_no_scores_that_the_metric_cannot_have(metric, low):
    assert _possible((-200.0, 200.0), metric) == (low, 100.0)


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert (_points(-1e-9), _points(-2.04), _percent(-1e-9)) == ("+0.0", "\N{MINUS SIGN}2.0", "0.0")


def test_what_cannot_be_told_apart_is_said():
    noisy = {"bitfit": [right(30, 50), right(34, 50)], "full": [right(35, 50), right(33, 50)]}
    found = judge(contest(noisy, 50))
    assert (found.advice.method, found.advice.sure) == ("full", False)
    assert "bitfit cannot be told from it with 50 test rows and 2 seeds" in found.advice.text


def test_a_method_that_diverged_is_not_compared():
    full = contest({"bitfit": [right(240)] * 2, "head": [right(200)] * 2, "full": [right(340)] * 2})
    lost = full.contestants[2]
    diverged = replace(lost, chosen=(lost.chosen[0], replace(lost.chosen[1], status="diverged", scores={})))
    found = judge(replace(full, contestants=(*full.contestants[:2], diverged)))
    assert found.line("full").score is None
    assert found.advice.method == "bitfit"
    assert any(note.startswith("full: the loss was not a number") for note in found.notes)


def test_pairing_makes_a_small_steady_difference_clear():
    """Both methods are right on the same rows but for a few: seeds and rows that they share do not count as noise."""
    first, second = [right(900, 1200)] * 3, [right(930, 1200)] * 3
    line = judge(contest({"bitfit": first, "full": second}, 1200)).line("full")
    assert line.p < 0.05
    assert line.difference_interval[1] - line.difference_interval[0] < line.interval[1] - line.interval[0]


def scored_by(contest, metric):
    """The contest as if its scores were of another metric."""
    contestants = []
    for one in contest.contestants:
        chosen = []
        for result in one.chosen:
            scores = {part: {metric: table["accuracy"]} for part, table in result.scores.items()}
            chosen.append(replace(result, metric=metric, scores=scores))
        contestants.append(replace(one, searched=tuple(chosen[:1]), chosen=tuple(chosen)))
    return replace(contest, metric=metric, contestants=tuple(contestants))


def test_without_rows_that_can_be_resampled_no_difference_is_clear():
    """Seeds that agree say nothing on the chance in the test rows."""
    winner = contest({"bitfit": [right(240), right(241)], "full": [right(340), right(341)]})
    found = judge(scored_by(winner, "macro_f1"))
    line = found.line("full")
    assert (line.p, line.interval, line.difference_interval) == (1.0, None, None)
    assert (found.advice.method, found.advice.sure) == ("full", False)
    assert "the chance in the test rows is not known for macro_f1" in found.advice.text
    assert any("cannot be resampled" in note for note in found.notes)
    assert "clearly" not in found.markdown() and "not clear" in found.markdown()


def test_a_difference_that_was_seen_and_is_not_clear_is_below_what_would_show():
    """Of many methods each must be further behind, by Holm's correction."""
    other = [42 <= row < 242 for row in range(400)]
    found = judge(contest({"bitfit": [right(220)] * 2} | {f"method {n}": [other] * 2 for n in range(8)}))
    line = found.line("method 0")
    assert line.difference == pytest.approx(-5) and line.difference_interval[1] < 0 and line.p > 0.05
    below = re.search(r"a difference below (\d+\.\d) points would not show", found.advice.text)
    assert float(below[1]) > 5


def test_the_speed_of_training_is_not_that_of_solved_heads(tmp_path):
    results = Results(tmp_path)
    results.trials.mkdir()
    for key, select, seconds in (("a", "none", 1000.0), ("b", "bias", 2.0)):
        cost = {"work": 10.0, "seconds": seconds}
        trial = Result(key, "done", "b", "t", "accuracy", {"select": select}, {}, 0.5, cost=cost)
        (results.trials / f"{key}.json").write_text(json.dumps(asdict(trial)))
    assert forecast.speed(results) == 5.0
