"""The settings of a service and the tokens that its clients need."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UsageError, suggest

SHORTEST_TOKEN = 16
LEVELS = ("info", "warning")  # of what is logged


def option(default: Any, help: str, *, least: float = 1, most: float = 1e9, choices: tuple[str, ...] = ()) -> Any:
    """A setting that is an option of `bitfit serve`: its help, and the numbers or words that it takes."""
    return field(default=default, metadata={"help": help, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The options of `bitfit serve`, each written once."""

    host: str = option("127.0.0.1", "address to listen on; other than loopback addresses need a token")
    port: int = option(8000, "port to listen on; 0 picks a free one", least=0, most=65535)
    workers: int = option(0, "number of model processes (threads if the system cannot fork); 0: one per core", least=0)
    batch_tokens: int = option(256, "maximum number of tokens in one pass through the base")
    max_wait: float = option(0.002, "seconds that a text waits for others to share its pass, at most", least=0)
    queue: int = option(4096, "maximum number of texts that wait; further requests get status 429")
    deadline: float = option(10.0, "seconds after which a request gets status 504", least=1e-3)
    memory: int = option(1024, "MB of deltas held in memory; the least recently used are dropped first")
    max_items: int = option(1024, "maximum number of texts in one request (never more than --queue)")
    max_text: int = option(100_000, "maximum number of characters in one text")
    max_body: int = option(8, "maximum size of one request in MB")
    max_delta: int = option(64, "maximum size of an uploaded delta in MB")
    watch: float = option(1.0, "seconds between two scans of the folder", least=1e-3)
    log: str = option("info", "info: a line per request; warning: only problems, start and stop", choices=LEVELS)
    drain: float = option(0.5, "seconds after a stop signal in which new requests get status 503", least=0)

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check(f"--{entry.name.replace('_', '-')}", getattr(self, entry.name), entry.metadata)

    @property
    def threads(self) -> int:
        """The number of model threads."""
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.workers or allowed or 1

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)


def _check(name: str, value: str | float, limits: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        if limits["choices"] and value not in limits["choices"]:
            raise UsageError(f'{name}: no "{value}".{suggest(value, limits["choices"])}')
    elif not limits["least"] <= value <= limits["most"]:
        raise UsageError(f"{name} {value}: must be between {limits['least']:g} and {limits['most']:,g}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is that of the local machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Token:
    """A secret that is compared in constant time and never shown."""

    def __init__(self, text: str) -> None:
        if len(text) < SHORTEST_TOKEN or not (text.isascii() and text.isprintable()) or " " in text:
            raise UsageError(f"a token needs at least {SHORTEST_TOKEN} printable ASCII characters and no space")
        self._digest = hashlib.sha256(text.encode()).digest()

    def matches(self, secret: bytes) -> bool:
        """Whether `secret` is this token."""
        return hmac.compare_digest(self._digest, hashlib.sha256(secret).digest())


@dataclass(frozen=True)
class Tokens:
    """The tokens of the clients: one that allows predictions, and one that also allows changes of tasks."""

    predict: Token | None = None  # None: everybody may get predictions
    change: Token | None = None  # None: nobody may change tasks

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Tokens:
        """From BITFIT_TOKEN and BITFIT_CHANGE_TOKEN, or from the files named by BITFIT_TOKEN_FILE and so on."""
        predict = _secret("BITFIT_TOKEN", environment)
        change = _secret("BITFIT_CHANGE_TOKEN", environment)
        if predict is not None and predict == change:
            raise UsageError("BITFIT_TOKEN and BITFIT_CHANGE_TOKEN must differ: only the second one allows changes")
        return cls(None if predict is None else Token(predict), None if change is None else Token(change))

    def check(self, settings: Settings) -> None:
        """Refuse an address that other machines can reach if there is no token."""
        if self.predict is None and not settings.loopback:
            raise UsageError(
                f"--host {settings.host} can be reached from other machines: set BITFIT_TOKEN (or BITFIT_TOKEN_FILE), "
                "or listen on 127.0.0.1"
            )


def _secret(name: str, environment: Mapping[str, str]) -> str | None:
    path = environment.get(name + "_FILE")
    if path:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}_FILE: {path} cannot be read as text") from error
    return environment.get(name) or None
