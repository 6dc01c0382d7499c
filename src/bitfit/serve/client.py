"""A small client for the service. It needs only the standard library and opens a connection per call."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ServiceError

PAGE = 1000  # tasks per request of a list


class Client:
    """A service at a URL. Errors are ServiceError."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout

    def predict(self, task: str, inputs: Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answer of a task to each input: a text, {"text", "text_pair"}, {"question", "context"} or {"words"}."""
        return list(self._call("POST", "/v1/predict", {"task": task, "inputs": list(inputs)})["results"])

    def predict_mixed(self, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers to inputs of several tasks: {"task", "text", ...}."""
        return list(self._call("POST", "/v1/predict", {"items": list(items)})["results"])

    def tasks(self, search: str = "") -> Iterator[dict[str, Any]]:
        """The tasks whose name or label contains `search`, by name."""
        offset = 0
        while True:
            query = urllib.parse.urlencode({"search": search, "offset": offset, "limit": PAGE})
            page = self._call("GET", f"/v1/tasks?{query}")["tasks"]
            yield from page
            offset += len(page)
            if len(page) < PAGE:
                return

    def task(self, name: str) -> dict[str, Any]:
        """One task."""
        return self._call("GET", _path(name))

    def put(self, name: str, delta: str | Path | bytes) -> dict[str, Any]:
        """Add or replace a task by a delta file."""
        return self._call("PUT", _path(name), delta if isinstance(delta, bytes) else Path(delta).read_bytes())

    def delete(self, name: str) -> dict[str, Any]:
        """Remove a task."""
        return self._call("DELETE", _path(name))

    def stats(self) -> dict[str, Any]:
        """Rates and latencies of the last minute, the queue, and the tasks in memory."""
        return self._call("GET", "/v1/stats")

    def ready(self) -> bool:
        """Whether the service is ready for requests."""
        try:
            return bool(self._call("GET", "/readyz")["ready"])
        except ServiceError:
            return False

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/octet-stream"}
        data = body
        if not isinstance(body, bytes | None):
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                content: dict[str, Any] = json.loads(response.read())
                return content
        except urllib.error.HTTPError as error:
            raise _service_error(error) from error
        except (OSError, ValueError) as error:
            raise ServiceError(0, f"{self.url}: no answer from the service ({error})") from error


def _path(name: str) -> str:
    return "/v1/tasks/" + urllib.parse.quote(name, safe="")


def _service_error(error: urllib.error.HTTPError) -> ServiceError:
    with error:
        text = error.read()
    try:
        detail = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):  # not from the service, but from a proxy before it
        detail = {"message": str(error), "field": None}
    retry_after = error.headers.get("Retry-After")
    return ServiceError(error.code, detail["message"], detail["field"], float(retry_after) if retry_after else None)
