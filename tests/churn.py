"""Requests while tasks are replaced: every answer is compared with what the version it names must say."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import numpy as np

from bitfit import Delta, predict
from bitfit.delta.safefile import decode
from bitfit.serve.load import Connection
from service import CHANGE, TEXTS, numbers
from support import delta_of


class Versions:
    """Which version each task had (None: it was removed), and the longest time that each may have been seen."""

    def __init__(self, lag: float = 0.0) -> None:
        self.lag = lag
        self.spans: dict[str, list[list[Any]]] = {}

    def begin(self, task: str, version: str | None) -> None:
        self.spans.setdefault(task, []).append([version, time.monotonic(), None])

    def end(self, task: str) -> None:
        """The last change is confirmed: what was there before is over, after the lag."""
        for span in self.spans[task][:-1]:
            span[2] = span[2] or time.monotonic() + self.lag

    def could_be(self, task: str, version: str | None, began: float, ended: float) -> bool:
        spans = self.spans[task]
        return any(v == version and since <= ended and (to is None or to >= began) for v, since, to in spans)


class Churn:
    """Clients that ask tasks while others replace and remove them; `wrong` has every answer that cannot be right.

    `lag` is how long an old version may still answer, `retries` how often a 502, 503 or 429 is tried again.
    """

    def __init__(self, base: Any, url: str, removals: float = 0.25, lag: float = 0.0, retries: int = 0) -> None:
        self.url = url
        self.removals = removals
        self.retries = retries
        self.names = [f"t{i}" for i in range(16)]
        pool = [delta_of(base, k, 2 + k % 3) for k in range(40)]
        self.files = [delta.encode() for delta in pool]
        self.versions = [Delta.checked(*decode(data, "x"), "x").meta.sha256[:16] for data in self.files]
        self.expected = {}
        for version, delta in zip(self.versions, pool, strict=True):
            answers = predict(delta, TEXTS, base)
            self.expected[version] = {text: numbers(answer) for text, answer in zip(TEXTS, answers, strict=True)}
        self.history = Versions(lag)
        self.codes: Counter[int] = Counter()
        self.wrong: list[Any] = []
        self.changes = 0
        self.retried: Counter[int] = Counter()
        self.over = False

    async def call(self, connection: Connection, method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
        code, body = await connection.call(method, path, data)
        for _ in range(self.retries):
            if code not in (429, 502, 503):
                break
            self.retried[code] += 1
            await asyncio.sleep(1.0)
            code, body = await connection.call(method, path, data)
        return code, body

    async def change(self, connection: Connection, task: str, number: int | None) -> None:
        self.history.begin(task, None if number is None else self.versions[number])
        path = f"/v1/tasks/{task}"
        if number is None:
            code, body = await self.call(connection, "DELETE", path)
        else:
            code, body = await self.call(connection, "PUT", path, self.files[number])
        if code not in (200, 201) or (number is not None and json.loads(body)["version"] != self.versions[number]):
            self.wrong.append((task, number, code, body))
        self.history.end(task)
        self.changes += 1

    async def put_all(self) -> None:
        connection = Connection(self.url, CHANGE)
        for number, task in enumerate(self.names):
            await self.change(connection, task, number)
        connection.close()

    async def churn(self, names: list[str], pause: float) -> None:
        draw = random.Random(names[0])
        connection = Connection(self.url, CHANGE)
        there = set(names)
        due = time.monotonic()
        while not self.over:
            task = draw.choice(names)
            remove = task in there and draw.random() < self.removals
            await self.change(connection, task, None if remove else draw.randrange(len(self.files)))
            there.discard(task) if remove else there.add(task)
            due += pause
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        connection.close()

    async def ask(self, number: int, count: int, pause: float = 0.0) -> None:
        """Ask until so many requests are answered, or all is over."""
        draw = random.Random(number)
        connection = Connection(self.url, None)
        for _ in range(count):
            if self.over:
                break
            task, texts = draw.choice(self.names), draw.sample(TEXTS, 2)
            began = time.monotonic()
            body = json.dumps({"task": task, "inputs": texts}).encode()
            code, answer = await self.call(connection, "POST", "/v1/predict", body)
            self.codes[code] += 1
            if not self.is_right(task, texts, code, answer, began):
                self.wrong.append((task, code, answer))
            await asyncio.sleep(pause)
        connection.close()

    def is_right(self, task: str, texts: list[str], code: int, body: bytes, began: float) -> bool:
        ended = time.monotonic()
        if code == 404:
            return self.history.could_be(task, None, began, ended)
        if code != 200:
            return False
        for text, answer in zip(texts, json.loads(body)["results"], strict=True):
            expected = self.expected[answer["version"]][text]
            same = answer["task"] == task and np.allclose(numbers(answer), expected, atol=1e-4)
            if not same or not self.history.could_be(task, answer["version"], began, ended):
                return False
        return True

    async def run(self, requests: int) -> None:
        await self.put_all()
        churning = [asyncio.create_task(self.churn(self.names[k::2], 2 / 20)) for k in range(2)]
        await asyncio.gather(*(self.ask(number, requests // 16) for number in range(16)))
        self.over = True
        await asyncio.gather(*churning)
