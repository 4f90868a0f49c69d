"""Logs: one line per event on stderr, plain or JSON. No prompt and no generated text is ever logged.

    log.info("request", extra={"fields": {"id": "gen-1", "status": 200}})

Values are escaped to ASCII and truncated, so nothing a client sends can forge a line. A thread writes them from a
bounded queue: with a full disk or a sleeping reader lines are dropped and counted, and nobody waits.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

VALUE_CHARS = 256
MESSAGE_CHARS = 1000
TRACE_CHARS = 8000
QUEUE_LINES = 10_000

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_UNQUOTED = re.compile(r"[A-Za-z0-9_.,:/+@-]+")


def set_up(form: Literal["plain", "json"], level: str) -> Writer:
    """Sends all loggers to stderr through one Writer."""
    writer = Writer(2, json_line if form == "json" else plain_line)
    root = logging.getLogger()
    root.handlers = [writer]
    root.setLevel(logging.WARNING)  # for other libraries
    logging.getLogger("tokenteller").setLevel(level.upper())
    logging.captureWarnings(True)
    return writer


def dropped() -> int:
    """Lines that could not be written so far."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, Writer))


class Writer(logging.Handler):
    """Formats on the calling thread, writes on its own."""

    def __init__(self, descriptor: int, line: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._line = line
        self._lines: queue.Queue[str] = queue.Queue(QUEUE_LINES)
        threading.Thread(target=self._write, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self._line(record) + "\n")
        except Exception:  # the queue is full or a value cannot be formatted: never fail the caller for it
            self.dropped += 1

    def flush(self) -> None:
        """Waits until everything is written, at most a second: the reader may be asleep."""
        end = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        separator = b""
        while True:
            data = separator + self._lines.get().encode("ascii", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
                separator = b""
            except OSError:
                self.dropped += 1
                separator = b"\n"  # the line may be half written: the next one must not continue it
            self._lines.task_done()


def event_fields(record: logging.LogRecord) -> dict[str, Any]:
    """A record's fields, truncated, in the order of the line."""
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": _truncated(record.getMessage(), MESSAGE_CHARS),
    }
    if not record.name.startswith("tokenteller"):
        fields["logger"] = record.name
    own = {"request_id": request_id.get()} | getattr(record, "fields", {})
    fields |= {name: _truncated(value, VALUE_CHARS) for name, value in own.items() if value is not None}
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)[-TRACE_CHARS:]
    return fields


def json_line(record: logging.LogRecord) -> str:
    """One ASCII JSON object."""
    return json.dumps(event_fields(record), default=str)


def plain_line(record: logging.LogRecord) -> str:
    """time LEVEL event name=value ...; a traceback follows, each of its lines behind a bar."""
    fields = event_fields(record)
    moment, level, event = fields.pop("time"), fields.pop("level"), fields.pop("event")
    trace = fields.pop("exception", None)
    pairs = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
    lines = [f"{moment} {level.upper():<7} {_escaped(event)}{pairs}"]
    if trace:
        lines += [f"    | {_escaped(line)}" for line in trace.splitlines()]
    return "\n".join(lines)


def _truncated(value: Any, length: int) -> Any:
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, str) and len(value) > length:
        return f"{value[:length]}...(+{len(value) - length})"
    return round(value, 6) if isinstance(value, float) else value


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _UNQUOTED.fullmatch(text) else json.dumps(text)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
