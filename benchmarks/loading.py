"""Peak memory while a base is loaded and its fingerprint computed, against the memory of its stored weights.

    python benchmarks/loading.py [FOLDER ...]

Without folders it makes two of a BERT of random weights, one in float32 and one in bfloat16. Each load is measured in a
process of its own, by the resident memory that Linux reports: mapped files count. A tiny base is loaded first, so that
imports do not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TYPES = ("float32", "bfloat16")


def measure(folder: str, dtype: str, tiny: str) -> dict[str, float]:
    """Megabytes at the peak and of the weights, in this process."""
    from bitfit import load_base

    for each in TYPES:
        load_base(tiny, each).fingerprint  # noqa: B018  it is computed
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    base = load_base(folder, dtype)
    base.fingerprint  # noqa: B018
    return {"peak": memory("VmHWM") - before, "stored": base.bytes / 1e6}


def measure_apart(folder: str, dtype: str, tiny: str) -> dict[str, float]:
    """The same, measured in a process of its own."""
    command = [sys.executable, __file__, "--one", folder, dtype, tiny]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def memory(key: str) -> float:
    """A line of /proc/self/status in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024e-6 * int(next(line for line in lines if line.startswith(key + ":")).split()[1])


def make(folder: Path, width: int, layers: int) -> list[str]:
    """Model folders of random weights in both types."""
    import torch
    from transformers import BertConfig, BertModel

    from bitfit.model.base import load_base

    tokenizer = load_base().tokenizer
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    model = BertModel(BertConfig(vocab_size=30522, num_attention_heads=width // 64, **sizes))
    made = []
    for dtype in TYPES:
        place = folder / f"{width}-{dtype}"
        model.to(getattr(torch, dtype)).save_pretrained(place)
        tokenizer.save_pretrained(place)
        made.append(str(place))
    return made


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--one":
        print(json.dumps(measure(*sys.argv[2:])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        tiny = make(Path(temporary), 64, 1)[0]
        folders = sys.argv[1:] or make(Path(temporary), 1024, 12)
        print("| file | stored in | MB of weights | peak / weights |")
        print("|---|---|---|---|")
        for folder in folders:
            for dtype in TYPES:
                found = measure_apart(folder, dtype, tiny)
                ratio = found["peak"] / found["stored"]
                print(f"| {Path(folder).name} | {dtype} | {found['stored']:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
