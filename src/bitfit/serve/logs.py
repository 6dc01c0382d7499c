"""Logs: one JSON object per line on stderr. Texts and tokens are never logged."""

from __future__ import annotations

import json
import logging
import time

_LOGGER = logging.getLogger("bitfit.serve")
_LEVELS = logging.getLevelNamesMapping()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{moment}.{record.msecs:03.0f}Z", "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log(level: str, event: str, **fields: object) -> None:
    """Write one line."""
    number = _LEVELS[level.upper()]
    if _LOGGER.isEnabledFor(number):
        _LOGGER.log(number, event, extra={"fields": fields})


def announce(event: str, **fields: object) -> None:
    """Write one line of level info whatever the level of the log: that the service started or stopped."""
    record = _LOGGER.makeRecord(_LOGGER.name, logging.INFO, "", 0, event, (), None, extra={"fields": fields})
    _LOGGER.handle(record)


def write_to_stderr(level: str) -> None:
    """Send everything of this level and above to stderr, warnings of the HTTP server included."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    for name, least in (("bitfit.serve", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least.upper())
