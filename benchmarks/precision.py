"""A base in half precision against float32: labels that differ, memory, seconds.

    python benchmarks/precision.py DELTA DEV_FILE [--base FOLDER] [--text COLUMN]

Each type is measured in a process of its own. The times are those of one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

TYPES = ("float32", "bfloat16", "float16")


def measure(delta: str, file: str, base: str | None, text: str | None, dtype: str) -> dict[str, Any]:
    """The labels of a file and what they cost, in this process."""
    import torch

    from bitfit import Delta, Predictor
    from bitfit.prediction.predictor import base_of

    torch.set_num_threads(1)
    found = Delta.load(delta)
    loaded = base_of(found, base, dtype)
    assert loaded.fingerprint == found.meta.fingerprint
    predictor = Predictor(found, loaded)
    texts = list(predictor.texts_in(file, text=text))
    list(predictor.answers(texts[:64]))
    began = time.process_time()
    answers = list(predictor.answers(texts))
    return {
        "labels": [answer.get("label", answer.get("value")) for answer in answers],
        "bytes": loaded.bytes,
        "seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("delta")
    parser.add_argument("file")
    parser.add_argument("--base")
    parser.add_argument("--text")
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dtype:
        print(json.dumps(measure(args.delta, args.file, args.base, args.text, args.dtype)))
        return
    found = {}
    for dtype in TYPES:
        command = [sys.executable, *sys.argv, "--dtype", dtype]
        found[dtype] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    full = found["float32"]
    print("| base stored in | MB | labels that differ | CPU seconds |")
    print("|---|---|---|---|")
    for dtype, own in found.items():
        differ = sum(a != b for a, b in zip(own["labels"], full["labels"], strict=True))
        share = f"{differ} of {len(full['labels']):,} ({1 - differ / len(full['labels']):.2%} equal)"
        print(f"| {dtype} | {own['bytes'] / 1e6:.1f} | {share} | {own['seconds']:.2f} |")


if __name__ == "__main__":
    main()
