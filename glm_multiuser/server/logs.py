"""Structured logs: one JSON object per line, with its request id."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Optional

from glm_multiuser.progress import Progress, show_progress

request_id: ContextVar[Optional[str]] = ContextVar("request_id", default=None)
"""Id of the request that the current task handles."""

FIELDS = "fields"
"""Record attribute for additional fields: `extra={FIELDS: {...}}`."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON. ASCII, so that no character can end the line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        current = request_id.get()
        if current is not None:
            line["request_id"] = current
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record for people at a terminal. Text from clients is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_shown(value)}" for name, value in getattr(record, FIELDS, {}).items()]
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        message = _escaped(record.getMessage().rstrip())
        lines = [" ".join([moment, f"{record.levelname.lower():7}", message, *fields])]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return "\n    ".join([lines[0], *map(_escaped, lines[1:])])


def _shown(value: object) -> str:
    """Quotes values that could be taken for several fields."""
    text = _escaped(str(value))
    return repr(value) if isinstance(value, str) and set(text) & set(" \\\"'") else text


def _escaped(text: str) -> str:
    """Escapes control characters, which could end a line or manipulate a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def show_or_log_progress(
    logger: logging.Logger, event: str, interval: float, **fields: object
) -> AbstractContextManager[Progress]:
    """Shows a progress bar on a terminal; elsewhere logs progress every `interval` seconds."""
    logged = time.monotonic()

    def log(done: int, total: int, what: str) -> None:
        nonlocal logged
        if time.monotonic() - logged >= interval:
            logged = time.monotonic()
            numbers = {"done": done, "total": total, "what": what}
            logger.info(event, extra={FIELDS: {**fields, **numbers}})

    return show_progress(None if sys.stderr.isatty() else log)


def configure_logging(as_json: bool) -> None:
    """Sends every record of the process from level INFO on to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    # Duplicates our own line per request, without its fields.
    logging.getLogger("uvicorn.access").disabled = True
