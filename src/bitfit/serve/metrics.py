"""What the service counts: for Prometheus since it started, for its page over the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
WINDOW = 60.0
LATEST = 20_000  # requests remembered of the last minute


class Metrics:
    """Counters without a label that a client could choose: neither tasks nor unknown paths are labels."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("bitfit_requests", "requests", ["route", "method", "status"], **own)
        self._latency = Histogram("bitfit_request_seconds", "time to answer", ["route"], buckets=SECONDS, **own)
        self._waited = Histogram("bitfit_queue_seconds", "longest wait in a pass", buckets=SECONDS, **own)
        self._pass = Histogram("bitfit_pass_seconds", "time of a pass through the base", buckets=SECONDS, **own)
        self._batch = Histogram("bitfit_pass_texts", "texts of a pass", buckets=SIZES, **own)
        self._batch_tokens = Histogram("bitfit_pass_tokens", "tokens of a pass", buckets=TOKENS, **own)
        self._texts = Counter("bitfit_texts", "texts answered", **own)
        self._tokens = Counter("bitfit_tokens", "tokens computed", **own)
        self.loads = Counter("bitfit_loads", "deltas loaded into memory", **own)
        self.evictions = Counter("bitfit_evictions", "deltas dropped from memory for others", **own)
        self._latest: deque[tuple[float, float, int]] = deque(maxlen=LATEST)  # when, how long, texts
        self._lock = Lock()

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A number that is read when it is asked for."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def answered(self, route: str, method: str, status: int, took: float, texts: int) -> None:
        """A request is over."""
        self._requests.labels(route, method, str(status)).inc()
        self._latency.labels(route).observe(took)
        if texts and status == 200:
            self._texts.inc(texts)
            self._latest.append((time.monotonic(), took, texts))

    def passed(self, texts: int, tokens: int, waited: float, took: float) -> None:
        """A pass through the base is over."""
        with self._lock:
            self._batch.observe(texts)
            self._batch_tokens.observe(tokens)
            self._tokens.inc(tokens)
            self._waited.observe(waited)
            self._pass.observe(took)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def minute(self) -> dict[str, float | None]:
        """Predictions of the last minute: how many, and how fast."""
        now = time.monotonic()
        recent = [entry for entry in list(self._latest) if now - entry[0] <= WINDOW]
        times = [took for _, took, _ in recent]
        p50, p99 = np.quantile(times, (0.5, 0.99)) if times else (None, None)
        span = max(1.0, min(WINDOW, now - recent[0][0])) if recent else WINDOW
        return {
            "requests_per_second": len(recent) / span,
            "texts_per_second": sum(texts for *_, texts in recent) / span,
            "p50_ms": None if p50 is None else float(p50) * 1e3,
            "p99_ms": None if p99 is None else float(p99) * 1e3,
        }
