"""The commands: each calls the library, then prints. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..data.columns import Sample
from ..data.source import DataFile, is_table
from ..errors import DataError, UsageError
from ..files import check_target, replace, require_folder
from ..prediction.output import STANDARD, beside, check_output, require_earlier_output, standard_input, write_rows
from ..serve.settings import Settings, Tokens
from ..training.plan import Plan, follows_recipe
from ..values import read as read_value
from . import contracts
from .contracts import show_json

SUSPECT_COLUMNS = ("line", "predicted", "probability", "label_probability")  # beside those of the data


def _columns(args: argparse.Namespace, *names: str) -> dict[str, str | None]:
    return {name: getattr(args, name) for name in names}


def demo(args: argparse.Namespace) -> None:
    from .demo import demo as run

    run(args.out)


def train(args: argparse.Namespace) -> None:
    # Before torch is imported, which takes seconds: a wrong option is reported at once.
    plan = Plan(**{entry.name: getattr(args, entry.name) for entry in fields(Plan) if hasattr(args, entry.name)})
    from ..training.run import has_checkpoints, sized, sweep
    from ..training.run import train as fit
    from . import show

    target = args.out or default_out(args.source)
    require_folder(target)
    several_sizes = isinstance(plan.train_size, Sequence)
    if args.suspects is not None and (several_sizes or not follows_recipe(plan)):
        raise UsageError(
            "--suspects needs the default recipe and one --train-size: remove --recipe, --lr, --epochs and --batch"
        )
    if args.suspects is not None:
        check_output(args.suspects, Path(args.source))
        require_earlier_output(args.suspects, SUSPECT_COLUMNS, more=True)
    if args.address and args.engine != "ray":
        raise UsageError("--address is only for --engine ray")
    if args.workers and args.engine != "ray":
        raise UsageError("--workers is only for --engine ray")
    start = sweep if several_sizes else fit
    resumed = args.resume and has_checkpoints(target)
    began = time.monotonic()
    with show.training_bar(quiet=args.json) as watch:
        options = {"out": target, "resume": args.resume, "watch": watch, "say": show.note, **_checkpoint_seconds()}
        run: Any
        if args.engine == "ray":
            run = _train_on_ray(args, plan, target, watch)
        else:
            run = start(args.source, args.base, plan=plan, **options)
    seconds = time.monotonic() - began
    if args.suspects is not None:
        count = write_rows(args.suspects, _suspect_rows(run, Path(args.source), plan.encoding), force=True)
        show.note(f"wrote {show.counted(count, 'row')} to {args.suspects}: labels that look wrong")
    elif not several_sizes and run.story is not None and run.story.suspects:
        show.note("--suspects FILE lists the rows whose labels look wrong.")
    if several_sizes and args.json:
        sizes = [contracts.training(each, sized(target, size), seconds) for size, each in run.items()]
        show_json({"sizes": sizes})
    elif several_sizes:
        show.sweep(run, target, seconds)
    elif args.json:
        show_json(contracts.training(run, target, seconds))
    else:
        show.run(run, target, seconds, args.base, resumed)


def _suspect_rows(run: Any, source: Path, encoding: str | None) -> Iterator[dict[str, Any]]:
    """The rows whose labels look wrong, with the other columns of the file, if it is the only one."""
    from ..prediction.predictor import other_columns

    columns, suspects = run.dataset.columns, run.story.suspects
    several_files = not source.is_file()
    known = {columns.text, columns.text_pair, columns.label, *SUSPECT_COLUMNS}
    others: dict[int, dict[str, object]] = {}
    if not several_files:
        sample = Sample.of(DataFile(source, encoding))
        others = other_columns(sample, [suspect.line for suspect in suspects], known)
    for suspect in suspects:
        row = {"split": suspect.split} if several_files else {}
        row |= {"line": suspect.line, columns.text: suspect.text}
        if suspect.text_pair is not None:
            row[columns.text_pair] = suspect.text_pair
        row |= others.get(suspect.line, {})
        row[columns.label or "label"] = suspect.label
        answer = {name: getattr(suspect, name) for name in SUSPECT_COLUMNS[1:]}
        yield beside(row, answer)


def _train_on_ray(args: argparse.Namespace, plan: Plan, target: Path, watch: Any) -> Any:
    from ..training.ray_training import train_on_ray
    from . import show

    where = {"address": args.address, "workers": args.workers}
    options: dict[str, Any] = {"resume": args.resume, "say": show.note, "watch": watch, **where}
    options |= _checkpoint_seconds()
    return train_on_ray(args.source, args.base, plan, target, **options)


def _checkpoint_seconds() -> dict[str, float]:
    """How often to write checkpoints, if the environment says so: tests that kill a run need many."""
    text = os.environ.get("BITFIT_CHECKPOINT_SECONDS")
    return {} if text is None else {"checkpoint_seconds": float(text)}


def default_out(source: str) -> Path:
    """The delta file of `train` without --out: the name of the data, in the current folder."""
    name = Path(source).name.removesuffix(".gz")
    stem = Path(name).stem if Path(source).is_file() else name
    return Path((stem or "delta") + ".safetensors")


def compare(args: argparse.Namespace) -> None:
    from ..study.methods import ComparePlan

    # Before torch is imported, which takes seconds: a wrong option is reported at once.
    options = {entry.name: getattr(args, entry.name) for entry in fields(ComparePlan) if hasattr(args, entry.name)}
    ComparePlan(**options)
    from ..report.comparison import compare as run
    from . import show

    target = args.out or Path(default_out(args.source).stem + "-compare")
    require_folder(target)
    check_target(target / "compare.html", Path(args.source))
    with suppress(OSError):
        target.rmdir()  # the check creates it, and a command that fails early must not leave an empty folder
    with show.training_bar(quiet=args.json) as watch:
        more = {"out": target, "watch": watch, "say": show.note, **_checkpoint_seconds()}
        comparison: Any = run(args.source, args.base, **options, **more)
    if args.json:
        show_json({**comparison.json(), "page": str(target / "compare.html")})
    else:
        show.comparison(comparison, target / "compare.html")


def predict(args: argparse.Namespace) -> None:
    if args.glue is not None:
        _submit(args)
        return
    if bool(args.texts) == (args.file is not None):
        raise UsageError("pass either texts or --file FILE")
    if args.file is not None and (args.engine == "ray" or args.task_column is not None or is_table(str(args.file))):
        _score(args)
        return
    for option in ("address", "workers", "format"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} is only for --engine ray and for many files")
    if args.out is not None:
        check_output(args.out, *(path for path in (args.file, args.delta) if path is not None and path != STANDARD))
    from ..prediction.predictor import Predictor
    from . import show
    from .answers import as_line

    predictor = Predictor(args.delta, args.base, args.long, args.dtype)
    rows: Iterator[dict[str, Any]]
    with _input(args) as file:
        if file is None:
            texts = predictor.texts_of(args.texts)
            answers = predictor.answers(texts)
            rows = (beside(_named(text), answer) for text, answer in zip(texts, answers, strict=False))
        else:
            sample = Sample.of(file)
            requested = _columns(args, "text", "text_pair")
            columns = predictor.columns_in(sample, False, **requested)
            if columns.text != predictor.columns.text:
                show.note(f'{args.file}: the text is column "{columns.text}".')
            answers = predictor.answers(predictor.texts_in(sample, **requested))
            rows = predictor.rows_in(sample, **requested)
        if args.out is not None:
            count = write_rows(args.out, rows, args.force, ".jsonl" if args.json else ".csv")
            show.note(f"wrote {show.counted(count, 'row')} to {args.out}")
        else:
            for answer in answers:
                print(
                    json.dumps(answer, ensure_ascii=False) if args.json else as_line(predictor.task, answer), flush=True
                )
        for text in file.notes if file is not None else ():
            show.note(text)
    for text in predictor.notes:
        show.note(text)


def _score(args: argparse.Namespace) -> None:
    """`predict` on the rows of many files, or with a column that names the task."""
    if args.out is None or args.out == STANDARD:
        raise UsageError("the rows of many files are written as several files: pass a folder with --out DIR")
    if args.file == STANDARD:
        raise UsageError("--engine ray and --task-column need files; they do not read standard input")
    if args.address and args.engine != "ray":
        raise UsageError("--address is only for --engine ray")
    from ..prediction.table import Engine, Scoring, local, score
    from . import show

    names = ("base", "dtype", "long", "task_column", "text", "text_pair", "encoding", "format")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    scoring = Scoring(str(args.delta), **options)
    engine: Engine = local
    if args.engine == "ray":
        from ..prediction.ray_table import ray_engine

        engine = ray_engine(args.address, args.workers)
    with show.counting_bar("scoring", quiet=args.json) as watch:
        scored = score(scoring, str(args.file), args.out, engine, args.force, watch)
    for file, why in scored.failures.items():
        show.note(f"{file}: {why}")
    if args.json:
        show_json(asdict(scored))
    else:
        show.out.print(_summary(scored, args.out), soft_wrap=True)
    if scored.failures:
        raise DataError(f"{show.counted(len(scored.failures), 'file')} could not be read to the end; see above")


def _summary(scored: Any, out: Path) -> str:
    """The result of scoring many files, in one line."""
    from . import show

    text = f"wrote {show.counted(scored.rows, 'row')} in {show.counted(scored.parts, 'part')} to {out}"
    if scored.kept:
        text += f"; {show.counted(scored.kept, 'part')} existed already"
    if scored.errors:
        text += f'; {show.counted(scored.errors, "row")} without an answer, see the column "error"'
    return text


@contextmanager
def _input(args: argparse.Namespace) -> Iterator[DataFile | None]:
    """The file of --file; None if the texts are on the command line."""
    if args.file is None:
        yield None
    elif args.file == STANDARD:
        with standard_input(args.encoding) as file:
            yield file
    else:
        yield DataFile(args.file, args.encoding)


def _named(text: Any) -> dict[str, Any]:
    """A text of the command line as a row."""
    return {"text": text} if isinstance(text, str) else dict(zip(("text", "text_pair"), text, strict=True))


def _submit(args: argparse.Namespace) -> None:
    """`predict --glue`: the prediction files of the GLUE server."""
    if args.texts or args.out is not None:
        raise UsageError("--glue DIR predicts entire test sets: remove the texts and --out")
    from ..prediction import glue
    from ..prediction.predictor import Predictor
    from . import show

    predictor = Predictor(args.delta, args.base, args.long, args.dtype)
    written = glue.submit(predictor, args.glue, task=args.task, file=args.file, folder=args.data)
    if args.json:
        show_json([{"file": str(path), "rows": rows, "expected": wanted} for path, rows, wanted in written])
        return
    for path, rows, wanted in written:
        doubt = "" if rows == wanted else f"; the server expects {wanted:,}"
        show.out.print(f"wrote {path} ({show.counted(rows, 'row')}{doubt})", soft_wrap=True)


def evaluate(args: argparse.Namespace) -> None:
    if args.errors is not None:
        check_output(args.errors, Path(args.delta), Path(args.source))
    from ..prediction.predictor import Predictor
    from . import show

    columns = _columns(args, "text", "text_pair", "label")
    predictor = Predictor(args.delta, args.base, args.long, args.dtype)
    result = predictor.evaluation(args.source, args.split, args.data, args.encoding, args.positive, **columns)
    for text in result.notes:
        show.note(text)
    if args.errors is not None:
        write_rows(args.errors, result.errors, args.force)
        count = show.counted(len(result.errors), "row")
        show.note(f"wrote {count} to {args.errors}: {result.task.wrong_means}")
    if args.json:
        show_json(contracts.evaluation(result))
    else:
        show.evaluation(result, args.source)


def count(args: argparse.Namespace) -> None:
    from ..model.audit import count as audit
    from . import show

    if args.base is not None and args.base_option is not None:
        raise UsageError(f"BASE is given twice: {args.base} and --base {args.base_option}; remove one")
    counts = audit(args.base or args.base_option, args.select, args.head, inject=args.inject)
    if args.json:
        names = {"names": [list(row) for row in counts.names()]} if args.names else {}
        show_json({**counts.json(), **names})
    elif args.names:
        show.out.print(show.table(["notation", "parameter (* is the layer)"], counts.names(), left=2))
    else:
        show.audit(counts)


def inspect(args: argparse.Namespace) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting numpy's threads would take longer than the command
    from ..delta.delta import Delta
    from ..delta.hub import local_path

    path = local_path(args.delta)
    delta = Delta.load(path)
    size = path.stat().st_size
    if args.plot is not None:
        from ..report import changemap

        require_folder(args.plot)
        check_target(args.plot, args.delta)
        if args.plot.is_file() and args.plot.stat().st_size and b"<svg" not in args.plot.read_bytes()[:1000]:
            raise UsageError(
                f"{args.plot}: exists and is not a picture of this command; remove it or name another file"
            )
        title = f"Change of {delta.meta.base} ({delta.meta.select})"
        replace(args.plot, changemap.svg(delta.change, title).encode())
    if args.json:
        show_json(contracts.inspection(delta, size))
    else:
        from . import show

        show.delta(delta, size)


def export(args: argparse.Namespace) -> None:
    if args.peft and args.fold:
        raise UsageError("--fold: PEFT adds biases to those of the base, so they cannot be folded; remove --fold")
    from ..delta.delta import Delta
    from ..prediction.export import export as write
    from ..prediction.peft_export import export_peft
    from ..prediction.predictor import base_of
    from . import show

    require_folder(args.out)
    delta = Delta.load(args.delta)
    base = base_of(delta, args.base, args.dtype)
    folder = export_peft(delta, base, args.out) if args.peft else write(delta, base, args.out, args.fold)
    show.out.print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}", soft_wrap=True)


def import_(args: argparse.Namespace) -> None:
    target = args.out or Path(args.folder.resolve().name + ".safetensors")
    require_folder(target)
    check_target(target, args.folder)
    from ..prediction.peft_import import import_peft
    from . import show

    delta = import_peft(
        args.folder, args.base, task=args.task, labels=args.labels, max_length=args.max_length, pairs=args.pairs
    )
    size = delta.save(target)
    if args.json:
        show_json({"delta": str(target), **contracts.inspection(delta, size)})
    else:
        show.delta(delta, size)
        show.note(f"wrote {target}; score it with: bitfit evaluate {target} DATA")


def push(args: argparse.Namespace) -> None:
    from ..prediction.push import push as send
    from . import show

    address = send(args.delta, args.repository, args.private, args.message)
    if args.json:
        show_json({"repository": args.repository, "url": address})
    else:
        show.out.print(f"pushed {args.delta} to {address}", soft_wrap=True)
        show.note(f"use it: bitfit predict hf:{args.repository} TEXT")


def study(args: argparse.Namespace) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting numpy's threads would take longer than the command
    from .study import act

    answer = act(args)
    if answer is not None:
        show_json(answer)


def serve(args: argparse.Namespace) -> None:
    table = {entry.name: getattr(args, entry.name) for entry in fields(Settings)}
    settings = read_value(Settings, table, "bitfit serve", UsageError)
    tokens = Tokens.of_environment()
    tokens.check(settings)
    with suppress(KeyboardInterrupt):  # a stop signal ends a service with 0, also while it starts
        try:
            from ..serve.run import serve as run
        except ModuleNotFoundError as error:
            raise UsageError(f'serving needs {error.name}: pip install "bitfit[serve]"') from error
        run(args.folder, args.base, settings, tokens, args.dtype)


def bench_serve(args: argparse.Namespace) -> None:
    from ..serve.load import Load, measure, read_texts

    load = Load(args.url, args.clients, args.texts, args.seconds, args.rate)
    measured = measure(load, read_texts(args.file, args.text))
    if args.json:
        show_json(measured.json())
    else:
        print(measured.table())


def tasks(args: argparse.Namespace) -> None:
    from ..data.sources import listing

    entries = listing(args.data)
    if args.json:
        show_json(entries)
        return
    from . import show

    show.tasks(entries)


def doctor(args: argparse.Namespace) -> None:
    from . import show
    from .doctor import examine

    facts = examine()
    if args.json:
        show_json(facts)
    else:
        show.out.print(show.table(["what", ""], [(name, str(value)) for name, value in facts.items()], left=2))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    command.__name__.strip("_").replace("_", "-"): command
    for command in (
        *(demo, train, compare, predict, evaluate, count, inspect, export, import_, push),
        *(study, serve, bench_serve, tasks, doctor),
    )
}
