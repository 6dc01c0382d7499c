"""The load generator of `bitfit bench-serve`: throughput, latencies and status codes of a service under load."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..data import loading
from ..data.columns import find_columns
from ..errors import DataError, UsageError
from .client import Client

SENTENCES = ("a film that is great fun from start to finish", "the plot goes nowhere", "rates rise again in june")
BARS = (1, 2, 5, 10, 20, 50, 100, 150, 200, 500, 1000, 2000, 5000, 10_000)
MAX_TEXTS = 5000  # texts read from a file


@dataclass(frozen=True)
class Load:
    """The number of clients, what they send, and for how long."""

    url: str
    clients: int = 64
    texts: int = 1
    seconds: float = 10.0
    rate: float | None = None  # requests per second; None: a client sends the next as soon as it has an answer
    seed: int = 0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise UsageError(f"{self.url}: is not the address of a service, such as http://127.0.0.1:8000")
        if min(self.clients, self.texts, self.seconds, self.rate or 1) <= 0:
            raise UsageError("--clients, --texts, --seconds and --rate must be more than 0")


@dataclass(frozen=True)
class Result:
    """Latencies and status codes of a load."""

    load: Load
    seconds: float
    latencies: np.ndarray[Any, Any]  # of the requests that were answered, in seconds
    codes: dict[int, int]  # 0: the connection broke

    def json(self) -> dict[str, Any]:
        """What `bench-serve --json` prints."""
        points: dict[str, float | None] = {}
        for q in (50, 90, 99, 99.9):
            points[f"p{q:g}_ms"] = float(np.percentile(self.latencies, q) * 1e3) if self.latencies.size else None
        rate = len(self.latencies) / self.seconds
        return {
            "clients": self.load.clients, "texts": self.load.texts, "seconds": self.seconds,
            "requests_per_second": rate, "texts_per_second": rate * self.load.texts, **points,
            "codes": {str(code): count for code, count in sorted(self.codes.items())},
            "histogram_ms": dict(zip(map(str, BARS), self._bars(), strict=True)),
        }  # fmt: skip

    def table(self) -> str:
        """What `bench-serve` prints."""
        numbers = self.json()
        speed = f"{numbers['requests_per_second']:.1f} requests/s, {numbers['texts_per_second']:.1f} texts/s"
        percentiles = []
        for name, value in numbers.items():
            if name.startswith("p") and name.endswith("_ms") and value:
                percentiles.append(f"{name.removesuffix('_ms')} {value:.1f} ms")
        lines = [f"{speed}: {self._outcomes()}"]
        if percentiles:
            lines.append(f"{', '.join(percentiles)} (answered requests only)")
        counts = self._bars()
        for bar, count in zip(BARS, counts, strict=True):
            if count:
                length = round(50 * count / max(1, max(counts)))
                lines.append(f"{f'<= {bar} ms':>12} {count:>8} {'#' * length}".rstrip())
        return "\n".join(lines)

    def _outcomes(self) -> str:
        """The number of requests by what became of them."""
        wordings = {200: "{} answered", 429: "{} refused (429)", 0: "{} without a response"}
        shown = []
        for code in sorted(self.codes, key=lambda code: (code != 200, code)):
            shown.append(wordings.get(code, f"{{}} with status {code}").format(f"{self.codes[code]:,}"))
        return ", ".join(shown) or "no request"

    def _bars(self) -> list[int]:
        edges = np.array([0, *BARS[:-1], np.inf]) / 1e3
        return [int(count) for count in np.histogram(self.latencies, edges)[0]]


def read_texts(path: Path | None, column: str | None = None) -> list[str]:
    """The texts of a file, or a few examples if there is none."""
    if path is None:
        return list(SENTENCES)
    rows = loading.stream_texts(path, find_columns(path, text=column))
    texts = [text for _, text, _ in islice(rows, MAX_TEXTS)]
    if not texts:
        raise DataError(f"{path}: contains no text")
    return texts


def measure(load: Load, texts: Sequence[str], tasks: Sequence[str] | None = None, token: str | None = None) -> Result:
    """Send random texts to random tasks: the named ones, else all that take single texts."""
    token = token or os.environ.get("BITFIT_TOKEN")
    if tasks is None:
        tasks = [task["name"] for task in Client(load.url, token).tasks() if not task["pairs"]]
    if not tasks:
        raise DataError(f"{load.url}: the service has no task for single texts")
    gc.collect()
    gc.freeze()  # a collection here (0.3 s with torch loaded) would look like a pause of the service
    try:
        return asyncio.run(_measure(load, texts, tasks, token))
    finally:
        gc.unfreeze()


async def _measure(load: Load, texts: Sequence[str], tasks: Sequence[str], token: str | None) -> Result:
    codes: Counter[int] = Counter()
    latencies: list[float] = []
    began = time.monotonic()
    until = began + load.seconds

    async def client(number: int) -> None:
        draw = random.Random(load.seed * 10_000 + number)
        connection = Connection(load.url, token)
        moments = due_times(draw, load.rate / load.clients, began, until) if load.rate else _at_once(until)
        # Latency counts from the moment a request was due: a slow service must not slow down the clients.
        for due in moments:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            items = [{"task": draw.choice(tasks), "text": draw.choice(texts)} for _ in range(load.texts)]
            code, _ = await connection.post("/v1/predict", {"items": items})
            codes[code] += 1
            if code == 200:
                latencies.append(time.monotonic() - due)
        connection.close()

    await asyncio.gather(*(client(number) for number in range(load.clients)))
    return Result(load, time.monotonic() - began, np.array(latencies), dict(codes))


def due_times(draw: random.Random, rate: float, began: float, until: float) -> Iterator[float]:
    """Random moments between `began` and `until`, `rate` per second on average (a Poisson process)."""
    due = began + draw.expovariate(rate)
    while due < until:
        yield due
        due += draw.expovariate(rate)


def _at_once(until: float) -> Iterator[float]:
    """The current time, again and again until the end."""
    while (now := time.monotonic()) < until:
        yield now


class Connection:
    """A persistent connection with the minimum of HTTP, so that the load generator costs little CPU."""

    def __init__(self, url: str, token: str | None) -> None:
        address = urlsplit(url)
        self.host = address.hostname or ""
        self.secure = ssl.create_default_context() if address.scheme == "https" else None
        self.port = address.port or (443 if self.secure else 80)
        bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        self.head = f"Host: {address.netloc}\r\nContent-Type: application/json\r\n{bearer}"
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """Send JSON; return status and body, status 0 if the connection broke."""
        return await self.call("POST", path, json.dumps(body).encode())

    async def call(self, method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
        """Send a request; return status and body, status 0 if the connection broke."""
        reused = self.streams is not None
        try:
            return await self._call(method, path, data)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            # The server may have closed a connection that was idle for long.
            if reused and isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                return await self.call(method, path, data)
            return 0, b""

    async def _call(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port, ssl=self.secure)
        reader, writer = self.streams
        writer.write(f"{method} {path} HTTP/1.1\r\n{self.head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        if b"connection: close" in head:
            self.close()
        return int(head.split(b" ", 2)[1]), answer

    def close(self) -> None:
        """Close the connection."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None
