"""What the load test sends, and when. The seed alone decides, whichever order requests are sent in."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from itertools import accumulate, count, islice, takewhile
from typing import Any

TEXT = """apple river stone garden window bridge summer winter letter paper candle forest island mountain market
    kitchen table mirror engine wheel copper silver golden yellow purple orange bottle basket ladder hammer needle
    thread button pocket jacket helmet camera guitar violin trumpet rabbit horse sheep tiger eagle spider butter
    cheese pepper sugar honey lemon cherry carrot potato onion bread soup salad dinner lunch morning evening
    station train ticket journey harbor sailor captain doctor teacher artist farmer baker singer writer reader
    number circle square corner center distance signal planet comet rocket thunder shadow desert valley meadow"""
WORDS = TEXT.split()


def make_body(options: Namespace, index: int) -> dict[str, Any]:
    """The body of request `index`, greedy unless --extra says otherwise."""
    rng = random.Random(f"{options.seed}/{index}")
    max_tokens, prompt = rng.randint(*options.max_tokens), _prompt(options, rng)
    body: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, "temperature": 0.0, "seed": options.seed + index}
    if options.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if not options.native:
        body |= {"model": options.model, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body | options.extra


def _prompt(options: Namespace, rng: random.Random) -> str | list[int]:
    length = rng.randint(*options.prompt_tokens)
    shared = min(options.shared_prefix, length)
    prefix_rng = random.Random(f"{options.seed}/prefix")
    if options.prompt_ids:
        ids = range(2, options.prompt_ids)  # 0 and 1 are often padding and end of text
        return [*prefix_rng.choices(ids, k=shared), *rng.choices(ids, k=length - shared)]
    return " ".join(prefix_rng.choices(WORDS, k=shared) + rng.choices(WORDS, k=length - shared))


def arrivals(options: Namespace) -> Iterator[float]:
    """Due times in seconds of a Poisson process. With --requests M they are scaled to end at M / rate."""
    rng = random.Random(f"{options.seed}/arrivals")
    times = accumulate(rng.expovariate(options.rate) for _ in count())
    if options.duration:
        yield from takewhile(lambda due: due < options.duration, times)
        return
    due = list(islice(times, options.requests))
    yield from (time / due[-1] * options.requests / options.rate for time in due)
