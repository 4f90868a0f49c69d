"""From the chunks of a transfer to the outcome and the times of one request."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from measure.transfer import Transfer

LINE_END = re.compile(rb"\r\n|\r|\n")  # the only line ends of SSE; U+2028 and U+0085 are text
SLICE = 64  # frames parsed before other streams get their turn
FAILED_FINISH = ("error", "cancelled", "deadline", "shutdown", "abort")


@dataclass
class Result:
    """One request. Times in seconds; `sent_s` counts from the start of the run."""

    index: int
    kind: str = "unfinished"  # then ok, or what went wrong
    detail: str = ""
    retry_after: str = ""
    sent_s: float | None = None
    client_wait: float | None = None
    marks: list[float] = field(default_factory=list)  # arrivals of token frames, since the request was sent
    chunks: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "unfinished")

    @property
    def ttft(self) -> float | None:
        return self.marks[0] if self.marks else None

    @property
    def e2e(self) -> float | None:
        return self.marks[-1] if self.marks else None

    @property
    def tpot(self) -> float | None:
        if not self.marks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.marks[-1] - self.marks[0]) / (self.output_tokens - 1)

    def meets(self, goals: dict[str, float]) -> bool:
        """Whether every figure is within its limit in ms. A figure that is missing is not."""
        tpot = 0.0 if self.output_tokens == 1 else self.tpot
        figures = {"ttft": self.ttft, "tpot": tpot, "e2el": self.e2e}
        return all((value := figures[name]) is not None and value * 1e3 <= limit for name, limit in goals.items())


async def judge(result: Result, wire: Transfer) -> None:
    """Fills in the result."""
    result.chunks, result.retry_after = len(wire.chunks), wire.retry_after
    if wire.fault == "timeout" or not wire.status:
        result.kind, result.detail = wire.fault, wire.detail
    elif wire.status != 200:
        result.kind, result.detail = f"http_{wire.status}", wire.text
    else:
        # A connection that broke after the end of the stream did no harm, so the frames decide.
        result.kind, result.detail = await _judge_stream(result, wire)


async def _judge_stream(result: Result, wire: Transfer) -> tuple[str, str]:
    """Kind and detail. Reads in slices, so that the stamps of other streams do not wait."""
    done, frames, payload = False, 0, b""
    try:
        for stamp, payload in payloads(wire.stamps, wire.chunks):
            frames += 1
            if frames % SLICE == 0:
                await asyncio.sleep(0)
            if payload == b"[DONE]":
                done = True
                continue
            frame = json.loads(payload)
            if frame.get("error"):
                return "error_frame", json.dumps(frame["error"])
            _absorb(result, stamp - wire.sent, frame)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return "bad_frame", f"{error!r} in {payload!r}"
    if result.finish in FAILED_FINISH:
        return f"finish_{result.finish}", "the server ended the stream with this reason"
    if result.finish or done:
        return "ok", ""
    if wire.chunks and not frames:
        return "not_a_stream", wire.text
    return "cut_stream", wire.detail or f"closed after {frames} frames without an end"


def payloads(stamps: Sequence[float], chunks: Sequence[bytes]) -> Iterator[tuple[float, bytes]]:
    """Each complete `data:` line with the arrival of the chunk that completed it.

    A line is taken for a frame: these servers put one JSON object on a line, and some leave out the blank line.
    """
    rest = b""
    for stamp, chunk in zip(stamps, chunks, strict=True):
        *lines, rest = LINE_END.split(rest + chunk)
        for line in lines:
            if line.startswith(b"data:"):
                yield stamp, line[5:].strip()


def _absorb(result: Result, at: float, frame: dict[str, Any]) -> None:
    usage = frame.get("usage") or {}
    if isinstance(tokens := usage.get("completion_tokens"), int):
        result.output_tokens = tokens
    if isinstance(tokens := usage.get("prompt_tokens"), int):
        result.prompt_tokens = tokens
    text, token, finish = _content(frame)
    # An empty frame before the first text is a role or a part of a character; after it, a token.
    if text or (token and result.marks):
        result.marks.append(at)
    result.finish = finish or result.finish


def _content(frame: dict[str, Any]) -> tuple[str, bool, str]:
    """Text of a native or OpenAI frame, whether it stands for a token, and its finish reason."""
    if frame.get("type") == "token":
        return frame["text"], True, ""
    if frame.get("type") == "end":
        return "", False, str(frame["finish_reason"])
    if not frame.get("choices"):
        return "", False, ""
    choice = frame["choices"][0]
    part = choice.get("delta") or choice
    text = part.get("text") or part.get("content") or part.get("reasoning_content") or part.get("reasoning") or ""
    finish = choice.get("finish_reason") or ""
    return text, not finish, finish
