"""Load test of a server that streams generated text, from outside over HTTP.

    python deploy/load_test.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64 --ignore-eos
    python deploy/load_test.py --url http://127.0.0.1:8000 --rate 4 --duration 60 --goodput ttft:200 tpot:50 e2el:2000
    python deploy/load_test.py --url http://127.0.0.1:8000 --endpoint /v1/completions --prompt-tokens 32:256

Any server with /generate in our form or OpenAI's /v1/completions or /v1/chat/completions. Closed loop (--concurrency):
each client sends its next request when the last one has ended, which measures throughput. Open loop (--rate): requests
arrive whatever the server does, which measures latency.

Figures in ms by this client's clock, of completed requests; tokens are those of the server's usage:
  TTFT   request sent -> first frame with text (a start frame or a chat role is no token)
  TPOT   (E2E - TTFT) / (output tokens - 1), once per request; a one-token answer has none
  ITL    gap between neighbouring token frames of a request, all pooled; a frame may carry several tokens
  E2E    request sent -> last token frame
  client wait   due time (open loop) or end of the previous request (closed loop) -> request sent: connecting, and any
                lag of this client; part of no other figure
  goodput       requests per second within every --goodput limit; SLO attainment = good / (completed + failed)
Rates are over the whole run, up to the last reply's end: --duration stops the sending, what is under way may finish.
Refused requests (429, 503) are counted and not retried. Lengths of text prompts are in words.
Exit code: 0; 1 when every request failed; 2 for bad arguments; 130 after Ctrl-C, with the figures so far.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure.figures import summarise
from measure.load import run_load
from measure.options import parse
from measure.report import print_report
from measure.transfer import first_model
from rich.console import Console
from rich.text import Text


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv, __doc__ or "")
    errors = Console(stderr=True)
    try:
        if not options.native and not options.model:
            options.model = first_model(options)
        load = asyncio.run(run_load(options, errors if errors.is_terminal else None))
    except KeyboardInterrupt:
        return 130  # before the first request; a later one ends the run in order
    except LookupError as error:
        errors.print(Text(f"load_test: {error}"), soft_wrap=True)
        return 1
    summary = summarise(load)
    print_report(summary, errors if options.json == "-" else Console())
    if options.json == "-":
        print(json.dumps(summary))
    elif options.json:
        Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    if load.interrupted:
        return 130
    return 1 if summary["requests"]["failed"] and not summary["requests"]["completed"] else 0


if __name__ == "__main__":
    sys.exit(main())
