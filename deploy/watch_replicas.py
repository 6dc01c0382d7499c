"""Keep nginx's list of replicas to those that are ready: `/readyz` decides.

    python3 watch_replicas.py --file replicas.conf --reload "nginx -p /etc/bitfit -c nginx.conf -s reload" \
        127.0.0.1:8001 127.0.0.1:8002 127.0.0.1:8003

The open-source nginx notices a dead replica when a request fails, but not one that is stuck. This asks every replica
each second, writes the list and reloads nginx when it changes. If no replica is ready the list stays as it is. It needs
only the standard library.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMEOUT = 6.0  # seconds; a replica decides within 4 that it is stuck


def is_ready(address: str) -> bool:
    """Whether the replica answers /readyz with 200."""
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=TIMEOUT) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def upstream(addresses: list[str]) -> str:
    """The lines of nginx's `upstream` block."""
    return "".join(f"server {address} max_fails=1 fail_timeout=2s;\n" for address in addresses)


def update(file: Path, addresses: list[str], reload: str) -> None:
    """Write the ready replicas and reload nginx, if there are any and they have changed."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        states = list(pool.map(is_ready, addresses))
    ready = [address for address, state in zip(addresses, states, strict=True) if state]
    text = upstream(ready)
    if not ready or (file.exists() and file.read_text() == text):
        return
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)
    print(f"ready: {' '.join(ready)}", file=sys.stderr, flush=True)
    subprocess.run(shlex.split(reload), check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="keep nginx's list of replicas to those that are ready")
    parser.add_argument("--file", type=Path, required=True, help="the file that nginx.conf includes")
    parser.add_argument("--reload", required=True, help="the command that reloads nginx")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two checks")
    parser.add_argument("replicas", nargs="+", metavar="HOST:PORT")
    args = parser.parse_args()
    while True:
        update(args.file, args.replicas, args.reload)
        time.sleep(args.interval)


if __name__ == "__main__":
    main()
