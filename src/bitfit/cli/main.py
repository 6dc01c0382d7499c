"""The commands: call, print. Heavy modules are imported inside the commands that need them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..errors import BitfitError, UsageError
from ..serve.settings import Settings, Tokens
from ..training.plan import Plan
from .options import parse, parser


def _columns(args: argparse.Namespace, *names: str) -> dict[str, str | None]:
    return {name: getattr(args, name) for name in names}


def demo(args: argparse.Namespace) -> None:
    from .demo import demo as run

    run(args.out)


def train(args: argparse.Namespace) -> None:
    plan = {entry.name: getattr(args, entry.name) for entry in fields(Plan) if hasattr(args, entry.name)}
    Plan(**plan)  # a wrong option must not cost the seconds that importing torch takes
    from ..training.run import sized, sweep
    from ..training.run import train as fit
    from . import show

    target = args.out or default_out(args.source)
    began = time.monotonic()
    several = len(plan.get("train_size", ())) > 1
    with show.training_bar(quiet=args.json) as watch:
        options = {"out": target, "resume": args.resume, "watch": watch, "say": show.note, **_checkpoint_seconds()}
        run: Any = (sweep if several else fit)(args.source, args.base, **options, **plan)
    took = time.monotonic() - began
    if several and args.json:
        _print_json({"sizes": [train_json(one, sized(target, size), took) for size, one in run.items()]})
    elif several:
        show.sweep(run, target, took)
    elif args.json:
        _print_json(train_json(run, target, took))
    else:
        show.run(run, target, took, args.base)


def default_out(source: str) -> Path:
    """Where a delta goes when nobody said: the data's name, in this folder."""
    name = Path(source).name.removesuffix(".gz")
    stem = Path(name).stem if Path(source).is_file() else name
    return Path((stem or "delta") + ".safetensors")


def train_json(run: Any, target: Path, took: float) -> dict[str, Any]:
    """The contract of `bitfit train --json`."""
    best, meta = run.best, run.best.delta.meta
    values = {name: {m: s.value for m, s in scores.items()} for name, scores in best.scores.items()}
    trials = [
        {"lr": o.trial.lr, "batch": o.trial.batch, "seed": o.trial.seed, "dev": o.dev, "status": o.status}
        for o in run.trials
    ]
    return {
        "delta": str(target),
        **{key: getattr(meta, key) for key in ("base", "task", "name", "select", "head")},
        **{key: getattr(best.trial, key) for key in ("lr", "batch", "seed", "epochs", "train_size", "protocol")},
        "trained": meta.trained,
        "metric": meta.metric,
        "dev": values["dev"],
        "test": values.get("test"),
        "more": {name: values[name] for name in values if name not in ("dev", "test", "train")},
        "train": values["train"],
        "gap": best.gap,
        "majority": run.majority,
        "trials": trials,
        "seconds": took,
        "threads": meta.threads,
    }


def predict(args: argparse.Namespace) -> None:
    if args.glue is not None:
        submit(args)
        return
    if bool(args.texts) == (args.file is not None):
        raise UsageError("predict takes texts or --file FILE, one of the two")
    from ..prediction.predictor import Predictor
    from . import show

    predictor = Predictor(args.delta, args.base)
    given = _columns(args, "text", "text_pair")
    if args.file:
        found = predictor.columns_in(args.file, False, **given)
        if found.text != predictor.columns.text:
            show.note(f"{args.file}: the text is column {found.text!r}.")
    source = predictor.texts_in(args.file, **given) if args.file else predictor.texts_of(args.texts)
    answers = predictor.answers(source)
    if args.out is not None:
        _write_csv(args.out, answers, args.file, args.delta)
        _note_cut(predictor)
        return
    for answer in answers:
        print(json.dumps(answer, ensure_ascii=False) if args.json else _line(answer), flush=True)
    _note_cut(predictor)


def _note_cut(predictor: Any) -> None:
    from .show import note

    if predictor.cut:
        note(f"{predictor.cut:,} texts were cut at {predictor.delta.meta.max_length} tokens")


def submit(args: argparse.Namespace) -> None:
    """`predict --glue`: the prediction files of the GLUE server."""
    if args.texts or args.out is not None:
        raise UsageError("--glue DIR writes files of whole test sets: it takes no texts and no --out")
    from ..prediction import glue
    from ..prediction.predictor import Predictor
    from . import show

    predictor = Predictor(args.delta, args.base)
    written = glue.submit(predictor, args.glue, task=args.task, file=args.file, folder=args.data)
    if args.json:
        _print_json([{"file": str(path), "rows": rows, "expected": wanted} for path, rows, wanted in written])
        return
    for path, rows, wanted in written:
        doubt = "" if rows == wanted else f"; the server wants {wanted:,}"
        show.out.print(f"wrote {path} ({rows:,} rows{doubt})", soft_wrap=True)


def _line(answer: dict[str, Any]) -> str:
    from .show import clean

    if "value" in answer:
        return f"{answer['value']:g}"
    if "tags" in answer:
        return clean(" ".join(f"{word}/{tag}" for word, tag in zip(answer["tokens"], answer["tags"], strict=True)))
    if "labels" in answer:
        return clean(", ".join(answer["labels"]) or "(none)")
    return f"{clean(answer['label'] if 'label' in answer else answer['answer'])}\t{answer['score']:.4f}"


def _write_csv(path: Path, answers: Iterable[dict[str, Any]], *inputs: Path | None) -> None:
    """Write answers as they come: a header of the first answer's keys, then a row each."""
    import codecs
    import csv

    from ..files import check_target, writing
    from .show import note

    check_target(path, *(given for given in inputs if given is not None))
    count = 0
    with writing(path) as file:
        writer = csv.writer(codecs.getwriter("utf-8")(file))
        for count, answer in enumerate(answers, 1):
            cells = _flat(answer)
            if count == 1:
                writer.writerow(cells)
            writer.writerow(cells.values())
    note(f"wrote {count:,} rows to {path}")


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as cells: a column per label's score, a list as JSON."""
    cells = {key: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for key, v in answer.items()}
    scores: Any = cells.pop("scores", {})
    named = (
        {f"p({label})": value for label, value in scores.items()} if isinstance(scores, dict) else {"scores": scores}
    )
    return {**cells, **named}


def evaluate(args: argparse.Namespace) -> None:
    from ..prediction.predictor import Predictor
    from . import show

    given = _columns(args, "text", "text_pair", "label")
    rows, scores, notes = Predictor(args.delta, args.base).evaluate(args.source, args.split, args.data, **given)
    for text in notes:
        show.note(text)
    if args.json:
        metrics = {name: score.value for name, score in scores.items()}
        interval = {name: [score.low, score.high] for name, score in scores.items()}
        _print_json({"rows": rows, "metrics": metrics, "interval": interval})
        return
    show.scores(rows, scores, args.source)


def count(args: argparse.Namespace) -> None:
    from ..model.audit import count as audit
    from . import show

    found = audit(args.base, args.select, args.head, inject=args.inject)
    if args.json:
        extra = {"names": [list(row) for row in found.names()]} if args.names else {}
        _print_json({**found.json(), **extra})
    elif args.names:
        show.out.print(show.table(["notation", "parameter (* is the layer)"], found.names(), left=2))
    else:
        show.audit(found)


# What `inspect --json` prints of a delta's metadata.
INSPECTED = (
    "base", "fingerprint", "select", "inject", "head", "task", "labels", "metrics", "pool", "init", "columns",
    "max_length", "trial", "trained", "total", "versions",
)  # fmt: skip


def inspect(args: argparse.Namespace) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's thread pool would cost more than the whole command
    from ..delta.delta import Delta

    found = Delta.load(args.delta)
    meta, size = found.meta, args.delta.stat().st_size
    if args.plot is not None:
        from ..files import check_target, replace
        from ..report import changemap

        check_target(args.plot, args.delta)
        replace(args.plot, changemap.svg(found.change, f"Change of {meta.base} ({meta.select})").encode())
    if args.json:
        table = meta.table()
        _print_json({**{key: table[key] for key in INSPECTED}, "bytes": size, "change": found.change})
    else:
        from . import show

        show.delta(found, size)


def export(args: argparse.Namespace) -> None:
    from ..delta.delta import Delta
    from ..prediction.export import export as write
    from ..prediction.predictor import base_of
    from . import show

    found = Delta.load(args.delta)
    folder = write(found, base_of(found, args.base), args.out, args.fold)
    show.out.print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def study(args: argparse.Namespace) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's thread pool would cost more than the whole command
    from .study import act

    answer = act(args)
    if answer is not None:
        _print_json(answer)


def serve(args: argparse.Namespace) -> None:
    settings = Settings(**{entry.name: getattr(args, entry.name) for entry in fields(Settings)})
    tokens = Tokens.of_environment()
    tokens.check(settings)
    try:
        from ..serve.run import serve as run
    except ModuleNotFoundError as error:
        raise UsageError(f'serving needs {error.name}: pip install "bitfit[serve]"') from error

    run(args.folder, args.base, settings, tokens)


def bench_serve(args: argparse.Namespace) -> None:
    from ..serve.load import Load, measure, read_texts

    load = Load(args.url, args.clients, args.texts, args.seconds, args.rate)
    found = measure(load, read_texts(args.file, args.text))
    if args.json:
        _print_json(found.json())
    else:
        print(found.table())


def tasks(args: argparse.Namespace) -> None:
    from ..data.sources import listing

    found = listing(args.data)
    if args.json:
        _print_json(found)
        return
    from . import show

    show.tasks(found)


def doctor(args: argparse.Namespace) -> None:
    from . import show
    from .doctor import examine

    facts = examine()
    if args.json:
        _print_json(facts)
    else:
        show.out.print(show.table(["what", ""], [(name, str(value)) for name, value in facts.items()], left=2))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    command.__name__.replace("_", "-"): command
    for command in (
        *(demo, train, predict, evaluate, count, inspect, export),
        *(study, serve, bench_serve, tasks, doctor),
    )
}

# ---- running ----


def _checkpoint_seconds() -> dict[str, float]:
    # For tests that kill a run: how often to write checkpoints.
    text = os.environ.get("BITFIT_CHECKPOINT_SECONDS")
    return {} if text is None else {"checkpoint_seconds": float(text)}


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {_one_line(str(message))}\n")


def main() -> NoReturn:
    """Run the command line; every error is one line on stderr and the contract's exit code."""
    warnings.showwarning = _warn
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:]))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(words: list[str]) -> int:
    try:
        if not words:
            parser().print_help()
            return 2
        args = parse(words)
        COMMANDS[args.command](args)
        sys.stdout.flush()
        return 0
    except BitfitError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except MemoryError:
        return _fail("not enough memory for this", 1)
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}", 1)
    except Exception as error:
        if os.environ.get("BITFIT_DEBUG"):
            raise
        return _fail(f"this is a bug in bitfit: {type(error).__name__}: {error} (BITFIT_DEBUG=1 shows where)", 1)


def _drop_output() -> None:
    """Send what is left of the output nowhere: Python would try once more at exit, and fail with another code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"bitfit: {_one_line(message)}\n")
    return code


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
