"""Logs: one JSON object a line on stderr, never a text and never a token."""

from __future__ import annotations

import json
import logging
import time

_LOG = logging.getLogger("bitfit.serve")


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = {"time": f"{moment}.{record.msecs:03.0f}Z", "level": record.levelname.lower()}
        facts |= {"event": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts)


def log(level: str, event: str, **facts: object) -> None:
    """Write a line."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if _LOG.isEnabledFor(number):
        _LOG.log(number, event, extra={"facts": facts})


def write_to_stderr(level: str) -> None:
    """From now on everything of this level and above is a line on stderr, the HTTP server's words too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    for name, least in (("bitfit.serve", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least.upper())
