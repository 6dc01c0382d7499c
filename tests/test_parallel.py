"""Workers that train together give the delta of one process, and exchange only what trains."""

from __future__ import annotations

import json
import traceback
from multiprocessing import get_context

import numpy as np
import pytest

from bitfit import Plan, train
from bitfit.data.on_disk import DiskTexts, NodeRows
from bitfit.errors import UsageError
from bitfit.training.group import Group, join, leave
from bitfit.training.run import train_in_group
from support import reviews

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning",  # fork is what makes the test fast
    "ignore:.*fork.*:DeprecationWarning",
)


def together(folder, count, work):
    """What `work` returns in each of `count` processes that form a group."""
    context = get_context("fork")
    meeting = f"file://{folder}/meeting"

    def child(rank, pipe):
        try:
            group = join(rank, count, meeting, timeout=120)
            pipe.send((work(group), None))
            leave(group)
        except BaseException:
            pipe.send((None, traceback.format_exc()))

    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=child, args=(rank, pipe[1])) for rank, pipe in enumerate(pipes)]
    for process in processes:
        process.start()
    found = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    assert not [error for _, error in found if error is not None], found
    return [result for result, _ in found]


def same(one, other, without=("nothing",)):
    """Whether two deltas are equal up to rounding; the gradient of b_k is nothing but rounding."""
    assert one.tensors.keys() == other.tensors.keys()
    for name, values in one.tensors.items():
        if not name.startswith(without) and ".key." not in name and ".k_" not in name:
            np.testing.assert_allclose(values, other.tensors[name], rtol=0, atol=1e-5, err_msg=name)


def runs(source, folder, tmp_path, workers=2, **options):
    """The runs of one process and of each of several workers."""
    plan = Plan(**{"lr": [1e-3, 3e-3], "batch": 4, "epochs": 8, **options})
    alone = train(source, str(folder), plan=plan)
    shared = together(tmp_path, workers, lambda group: train_in_group(group, source, str(folder), plan, None, False))
    return alone, shared


@pytest.mark.parametrize("architecture, workers", [("bert", 3), ("roberta", 2), ("llama", 2)])
def test_workers_train_the_delta_of_one_process(folders, csv_file, tmp_path, architecture, workers):
    inject = "bias" if architecture == "llama" else "none"
    alone, shared = runs(csv_file, folders(architecture), tmp_path, workers, inject=inject)
    assert alone.best.history.losses[-1].step >= 100
    for run in shared:
        for own, other in zip(alone.trials, run.trials, strict=True):
            same(own.delta, other.delta)
            assert own.dev == pytest.approx(other.dev, abs=0.05)
    assert all(np.array_equal(shared[0].best.delta.tensors[name], values)
               for name, values in shared[1].best.delta.tensors.items())  # fmt: skip


@pytest.mark.parametrize("name", ["single.csv", "pairs.csv", "numbers.jsonl"])
def test_rows_on_disk_train_the_delta_of_rows_in_memory(folders, tmp_path, name):
    """One worker reads for all; repeated and conflicting texts are split as in memory."""
    path = tmp_path / name
    rows = [*reviews(64), *reviews(12), ("the film", "positive"), ("the film", "negative"), ("é𝄞 film", "positive")]
    if name == "numbers.jsonl":
        lines = [json.dumps({"text": text, "label": 0.5 + len(text) / 7}) for text, _ in rows]
    elif name == "pairs.csv":
        lines = ["text,text_pair,label", *(f"{text},{text[::-1]},{label}" for text, label in rows)]
    else:
        lines = ["text,label", *(f"{text},{label}" for text, label in rows)]
    path.write_text("\n".join(lines) + "\n")
    plan = Plan(lr=1e-3, batch=4, epochs=2)
    alone = train(path, str(folders("bert")), plan=plan)

    def work(group):
        shared = NodeRows(tmp_path / "rows", leader=group.rank == 0)
        run = train_in_group(group, path, str(folders("bert")), plan, None, False, rows=shared)
        assert isinstance(run.dataset.train.texts, DiskTexts)
        return run, list(run.dataset.train.texts), list(run.dataset.dev.texts)

    for run, train_texts, dev_texts in together(tmp_path, 2, work):
        assert train_texts == alone.dataset.train.texts
        assert dev_texts == alone.dataset.dev.texts
        assert set(alone.notes) <= set(run.notes)
        same(alone.best.delta, run.best.delta)


def test_words_of_all_workers_count_alike(folders, tmp_path):
    path = tmp_path / "tags.jsonl"
    lines = []
    for text, label in reviews(48):
        words = text.split()
        lines.append(json.dumps({"tokens": words, "tags": [label if word in text[:9] else "O" for word in words]}))
    path.write_text("\n".join(lines) + "\n")
    alone, shared = runs(path, folders("bert"), tmp_path, task="tagging", epochs=3)
    same(alone.best.delta, shared[0].best.delta)


def test_a_recipe_is_followed_together(folders, csv_file, tmp_path):
    alone, shared = runs(
        csv_file, folders("bert"), tmp_path, lr=None, epochs=None, batch=None, seed=1, dropout="first-tenth"
    )
    one, other = alone.best.delta, shared[0].best.delta
    same(one, other, without=("head.",))
    # The head is divided by a temperature, which is searched only so far: its direction is the same.
    weights = [delta.tensors["head.classifier.weight"] for delta in (one, other)]
    directions = [weight / np.linalg.norm(weight) for weight in weights]
    np.testing.assert_allclose(*directions, rtol=0, atol=1e-5)


def test_only_what_trains_is_exchanged(folders, csv_file, tmp_path):
    plan = Plan(lr=[1e-3, 3e-3], batch=4, epochs=1)

    def work(group):
        run = train_in_group(group, csv_file, str(folders("bert")), plan, None, False)
        return run.best.delta.meta.trained, group.bytes, group.steps, run.notes

    for trained, summed, steps, notes in together(tmp_path, 2, work):
        assert summed == steps * 4 * 2 * (trained + 1)  # two lanes: their gradients and their losses
        assert any("2 workers summed" in note for note in notes)


def test_a_group_goes_on_from_the_checkpoint_of_its_first_worker(folders, csv_file, tmp_path):
    from bitfit.training.checkpoint import Store

    plan = Plan(lr=1e-3, batch=4, epochs=3)
    whole = train(csv_file, str(folders("bert")), plan=plan).best.delta
    out = tmp_path / "d.safetensors"

    def stopped(group):
        saved, Store.due = Store.due, lambda self: self.folder is not None
        real = Store.save

        def save(self, number, step, tensors, facts):
            real(self, number, step, tensors, facts)
            if self.folder is not None and step == 9:
                raise UsageError("power cut")

        Store.save = save
        try:
            train_in_group(group, csv_file, str(folders("bert")), plan, out, False)
        except (UsageError, RuntimeError):
            pass
        finally:
            Store.due, Store.save = saved, real

    def work(group):
        return train_in_group(group, csv_file, str(folders("bert")), plan, out, True)

    (tmp_path / "first").mkdir()
    together(tmp_path / "first", 1, stopped)
    assert list((tmp_path / "d.run").glob("*.checkpoint"))
    found = together(tmp_path, 2, work)
    same(whole, found[0].best.delta)
    same(whole, found[1].best.delta)
    assert out.is_file()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_cover_a_batch_once(count, size):
    rows = list(range(count))
    shares = [rows[Group(rank, size).share(count)] for rank in range(size)]
    assert [row for share in shares for row in share] == rows
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_workers_cannot_do_together_is_refused(csv_file):
    with pytest.raises(UsageError, match="one size at a time"):
        train_in_group(Group(0, 2), csv_file, None, Plan(train_size=[10, 20]), None, False)
    with pytest.raises(UsageError, match="in one process"):
        train_in_group(Group(0, 2), csv_file, None, Plan(select="diff_pruning(all, 1%)", lr=1e-3), None, False)
