"""The options of the load test."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from measure.arguments import GOALS, endpoint, goal, json_object, lengths, number, output_file, server_url, text_in


def make_parser(help_text: str) -> argparse.ArgumentParser:
    first, _, rest = help_text.partition("\n\n")
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


def parse(argv: Sequence[str] | None, help_text: str) -> argparse.Namespace:
    """Exits with code 2 and one line for what cannot be run. Adds `target`, `native` and `chat`."""
    parser = make_parser(help_text)
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
