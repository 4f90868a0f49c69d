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

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure.arguments import GOALS, endpoint, goal, json_object, lengths, number, output_file, server_url, text_in
from measure.figures import summarise
from measure.load import run_load
from measure.report import print_report
from measure.transfer import first_model
from rich.console import Console
from rich.text import Text


def make_parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=raw, allow_abbrev=False)
    count, natural, positive = number(1), number(0), number(0, float, above=True)
    add = parser.add_argument_group("server").add_argument
    add("--url", type=server_url, required=True, help="such as http://127.0.0.1:8000")
    add("--endpoint", type=endpoint, default="/generate", help="native or OpenAI path (%(default)s)")
    add("--model", type=text_in("utf-8"), help="name of the model, for OpenAI paths (the first of /v1/models)")
    add("--api-key", type=text_in("ascii"), help="sent as a bearer token")
    add("--timeout", type=positive, default=600.0, metavar="S", help="seconds for a whole request (%(default)g)")
    group = parser.add_argument_group("load")
    add = group.add_mutually_exclusive_group().add_argument
    add("--concurrency", type=count, metavar="N", help="closed loop: N clients (8)")
    add("--rate", type=positive, metavar="R", help="open loop: R requests per second, Poisson arrivals")
    add = group.add_mutually_exclusive_group().add_argument
    add("--requests", type=count, metavar="M", help="stop after M requests (64)")
    add("--duration", type=positive, metavar="S", help="send for S seconds")
    group.add_argument("--warmup", type=natural, default=0, metavar="M", help="requests before the clock starts (0)")
    add = parser.add_argument_group("requests").add_argument
    add(
        "--prompt-tokens",
        type=lengths,
        default="128",
        metavar="N[:M]",
        help="length of prompts, in words (%(default)s)",
    )
    add("--prompt-ids", type=number(3), metavar="VOCAB", help="exact lengths: send token ids from 2 to VOCAB-1")
    add("--shared-prefix", type=natural, default=0, metavar="N", help="first words or ids that all prompts share (0)")
    add("--max-tokens", type=lengths, default="128", metavar="N[:M]", help="(%(default)s)")
    add("--ignore-eos", action="store_true", help="always generate max_tokens")
    add("--seed", type=natural, default=0, help="of the workload; request i is sent with seed + i (0)")
    add("--extra", type=json_object, default={}, metavar="JSON", help="merged into every request body")
    add = parser.add_argument_group("report").add_argument
    add("--goodput", type=goal, nargs="+", default=[], metavar="NAME:MS", help=f"SLO: limits on {', '.join(GOALS)}")
    add("--json", type=output_file, metavar="FILE", help="write all figures; -: to stdout, and the report to stderr")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with code 2 and one line for what cannot be run. Adds `target`, `native` and `chat`."""
    parser = make_parser()
    options = parser.parse_args(argv)
    options.goodput = dict(options.goodput)
    options.concurrency = options.concurrency or (None if options.rate else 8)
    options.requests = options.requests or (None if options.duration else 64)
    options.target = options.url + options.endpoint
    options.native = options.endpoint.endswith("/generate")
    options.chat = options.endpoint.endswith("/chat/completions")
    if options.native and options.model:
        parser.error("--model is for OpenAI endpoints; /generate has no such field")
    if options.chat and options.prompt_ids:
        parser.error("--prompt-ids: chat takes only text")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
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
