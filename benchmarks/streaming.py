"""Memory of a worker that holds its rows in memory, against one that maps them from files (`train --engine ray`).

    python benchmarks/streaming.py [ROWS ...]

Rows are drawn from made-up words; each way runs in a process of its own, which reads and tokenises a Parquet file for
MiniLM and then takes 1,000 batches. Counted is memory that cannot be given back without writing it somewhere
(RssAnon), above what it was before.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROWS = (100_000, 300_000)
WAYS = ("memory", "disk")
WORDS = 25  # per row, on average
BATCHES = 1000


def write(path: Path, rows: int) -> None:
    """A Parquet file of labelled rows."""
    import pyarrow
    import pyarrow.parquet as pq

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(WORDS // 2, WORDS * 3 // 2))) for _ in range(rows)]
    labels = [draw.choice(("positive", "negative")) for _ in range(rows)]
    pq.write_table(pyarrow.table({"text": texts, "label": labels}), path)


def anonymous() -> float:
    """Megabytes of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024e-6 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def measure(path: str, way: str, folder: str) -> dict[str, float]:
    """Peak and final megabytes, and the seconds, of reading and of taking batches."""
    from bitfit import Plan, load_base
    from bitfit.data.on_disk import NodeRows
    from bitfit.training.loop import batch_rows
    from bitfit.training.run import prepare

    base = load_base()
    base.fingerprint  # noqa: B018  it is computed
    before = anonymous()
    peak = [before]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    rows = NodeRows(Path(folder), leader=True) if way == "disk" else None
    began = time.monotonic()
    job, trials = prepare(path, base, Plan(lr=1e-3, batch=32, epochs=1), lambda _: None, rows=rows)
    read = time.monotonic() - began
    began = time.monotonic()
    for step in range(1, BATCHES + 1):
        job.train.rows.take(batch_rows(trials[0].trial, step, len(job.train)))
    return {
        "peak": peak[0] - before,
        "held": anonymous() - before,
        "read": read,
        "batch": (time.monotonic() - began) / BATCHES * 1e3,
    }


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--one":
        print(json.dumps(measure(*sys.argv[2:])))
        return
    print("| rows | kept in | MB held | MB at the peak | seconds to read | ms to take a batch of 32 |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for rows in [int(text) for text in sys.argv[1:]] or ROWS:
            path = Path(temporary) / f"{rows}.parquet"
            write(path, rows)
            for way in WAYS:
                folder = str(Path(temporary) / f"{rows}-{way}")
                command = [sys.executable, __file__, "--one", str(path), way, folder]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                cells = [f"{found[key]:.0f}" for key in ("held", "peak", "read")]
                print(f"| {rows:,} | {way} | {' | '.join(cells)} | {found['batch']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
