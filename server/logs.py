"""Logs: one line per event, plain or JSON, on stderr. No prompt and no generated text is ever logged.

    log.info("request", extra={"fields": {"id": "gen-1", "status": 200}})

What a client sent cannot forge a line: values are escaped to ASCII and cut. Lines are written by a thread of their own
from a bounded queue; where the disk is full or the reader of a pipe sleeps, lines are dropped and counted, and nobody
waits.
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

_BARE = re.compile(r"[A-Za-z0-9_.,:/+@-]+")


def set_up(form: Literal["plain", "json"], level: str) -> Writer:
    """All loggers write through one Writer to stderr from now on."""
    writer = Writer(2, json_line if form == "json" else plain_line)
    root = logging.getLogger()
    root.handlers = [writer]
    root.setLevel(logging.WARNING)  # other libraries speak when something is wrong
    logging.getLogger("tokenteller").setLevel(level.upper())
    logging.captureWarnings(True)
    return writer


def dropped() -> int:
    """Lines that could not be written so far."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, Writer))


class Writer(logging.Handler):
    """Formats where the event happens, writes from a thread of its own."""

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
        except Exception:  # full, or an event that cannot be told: no reason to fail what it tells of
            self.dropped += 1

    def flush(self) -> None:
        """Waits until all is written, but not for long: whoever reads may be asleep."""
        end = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        torn = b""
        while True:
            data = torn + self._lines.get().encode("ascii", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
                torn = b""
            except OSError:
                self.dropped += 1
                torn = b"\n"  # what was written of this line must not run into the next
            self._lines.task_done()


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """What a record tells, cut to its bounds, in the order of the line."""
    told: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": _cut(record.getMessage(), MESSAGE_CHARS),
    }
    if not record.name.startswith("tokenteller"):
        told["logger"] = record.name
    fields = {"request_id": request_id.get()} | getattr(record, "fields", {})
    told |= {name: _cut(value, VALUE_CHARS) for name, value in fields.items() if value is not None}
    if record.exc_info:
        told["exception"] = logging.Formatter().formatException(record.exc_info)[-TRACE_CHARS:]
    return told


def json_line(record: logging.LogRecord) -> str:
    """One JSON object, pure ASCII."""
    return json.dumps(facts(record), default=str)


def plain_line(record: logging.LogRecord) -> str:
    """time LEVEL event name=value ...; the lines of a traceback follow, each behind a bar."""
    told = facts(record)
    moment, level, event = told.pop("time"), told.pop("level"), told.pop("event")
    trace = told.pop("exception", None)
    pairs = "".join(f" {name}={_shown(value)}" for name, value in told.items())
    lines = [f"{moment} {level.upper():<7} {_escaped(event)}{pairs}"]
    if trace:
        lines += [f"    | {_escaped(line)}" for line in trace.splitlines()]
    return "\n".join(lines)


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]}...(+{len(value) - most})"
    return round(value, 6) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
