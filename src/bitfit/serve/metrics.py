"""Counters: for Prometheus since the start, for the page over the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
QUEUED = "longest time a text of the pass waited in the queue"
WINDOW = 60.0
MAX_RECENT = 20_000  # requests remembered of the last minute


class Metrics:
    """The metrics of one service. No label has a value that a client could choose, so their number is bounded."""

    def __init__(self) -> None:
        # They would double the series, and every value of them is the time of the start.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("bitfit_requests", "requests", ["route", "method", "status"], **shared)
        self._latency = Histogram("bitfit_request_seconds", "time to answer", ["route"], buckets=SECONDS, **shared)
        self._waited = Histogram("bitfit_queue_seconds", QUEUED, buckets=SECONDS, **shared)
        self._pass = Histogram("bitfit_pass_seconds", "time of a pass through the base", buckets=SECONDS, **shared)
        self._batch = Histogram("bitfit_pass_texts", "texts of a pass", buckets=SIZES, **shared)
        self._batch_tokens = Histogram("bitfit_pass_tokens", "tokens of a pass", buckets=TOKENS, **shared)
        self._texts = Counter("bitfit_texts", "texts answered", **shared)
        self._tokens = Counter("bitfit_tokens", "tokens computed", **shared)
        self.loads = Counter("bitfit_loads", "deltas loaded into memory", **shared)
        self.evictions = Counter("bitfit_evictions", "deltas evicted from memory", **shared)
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=MAX_RECENT)  # moment, seconds, texts
        self._lock = Lock()

    def add_gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read on demand."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def count_request(self, route: str, method: str, status: int, seconds: float, texts: int) -> None:
        """Count an answered request."""
        self._requests.labels(route, method, str(status)).inc()
        self._latency.labels(route).observe(seconds)
        if texts and status == 200:
            self._texts.inc(texts)
            self._recent.append((time.monotonic(), seconds, texts))

    def count_pass(self, texts: int, tokens: int, waited: float, seconds: float) -> None:
        """Count a pass through the base."""
        with self._lock:
            self._batch.observe(texts)
            self._batch_tokens.observe(tokens)
            self._tokens.inc(tokens)
            self._waited.observe(waited)
            self._pass.observe(seconds)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def last_minute(self) -> dict[str, float | None]:
        """Rates and latencies of the predictions of the last minute."""
        now = time.monotonic()
        recent = [entry for entry in list(self._recent) if now - entry[0] <= WINDOW]
        if not recent:
            return {"requests_per_second": 0.0, "texts_per_second": 0.0, "p50_ms": None, "p99_ms": None}
        span = max(1.0, min(WINDOW, now - recent[0][0]))
        p50, p99 = np.quantile([seconds for _, seconds, _ in recent], (0.5, 0.99))
        return {
            "requests_per_second": len(recent) / span,
            "texts_per_second": sum(texts for _, _, texts in recent) / span,
            "p50_ms": float(p50) * 1e3,
            "p99_ms": float(p99) * 1e3,
        }
