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

    host: str = option("127.0.0.1", "address to listen on; any but a loopback address needs a token")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    workers: int = option(0, "model processes (threads where forking does not work); 0: one per core", least=0)
    batch_tokens: int = option(256, "most tokens of one pass through the base")
    max_wait: float = option(0.002, "most seconds that a text waits for others while a worker is idle", least=0)
    queue: int = option(4096, "most texts that wait; beyond it requests get 429")
    deadline: float = option(10.0, "seconds after which a request gets 504", least=1e-3)
    memory: int = option(1024, "MB of deltas kept in memory; the least recently used are dropped first")
    max_items: int = option(1024, "most texts of one request")
    max_text: int = option(100_000, "most characters of one text")
    max_body: int = option(8, "most MB of one request")
    max_delta: int = option(64, "most MB of an uploaded delta")
    watch: float = option(1.0, "seconds between two scans of the folder", least=1e-3)
    log: str = option("info", "info: a line per request; warning: only what needs attention", choices=LEVELS)
    drain: float = option(0.5, "seconds between a stop signal and the closing of idle connections", least=0)

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check(f"--{entry.name.replace('_', '-')}", getattr(self, entry.name), entry.metadata)

    @property
    def threads(self) -> int:
        """How many model threads there are."""
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
    """Whether a host name or address means this machine."""
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

    def matches(self, given: bytes) -> bool:
        """Whether this is the secret."""
        return hmac.compare_digest(self._digest, hashlib.sha256(given).digest())


@dataclass(frozen=True)
class Tokens:
    """The token that may ask and the token that may change; None: everybody may ask, nobody may change."""

    ask: Token | None = None
    change: Token | None = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Tokens:
        """From BITFIT_TOKEN and BITFIT_CHANGE_TOKEN, or from the files named by BITFIT_TOKEN_FILE and so on."""
        ask, change = (_secret(name, environment) for name in ("BITFIT_TOKEN", "BITFIT_CHANGE_TOKEN"))
        if ask is not None and ask == change:
            raise UsageError("BITFIT_TOKEN and BITFIT_CHANGE_TOKEN must differ: one may ask, the other may change")
        return cls(None if ask is None else Token(ask), None if change is None else Token(change))

    def check(self, settings: Settings) -> None:
        """Refuse to be reachable from elsewhere without a token."""
        if self.ask is None and not settings.loopback:
            raise UsageError(
                f"--host {settings.host} can be reached from elsewhere: set BITFIT_TOKEN (or BITFIT_TOKEN_FILE), "
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
