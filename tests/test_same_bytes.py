"""The same request gives the same bytes: alone, in random crowds, after random histories, with rows reused or not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live import CLIENT, Live, serve

REQUESTS = int(os.environ.get("TOKENTELLER_EXAMPLES", "20"))  # 200 by hand
FORMS = [("fp32", "fp32"), ("fp16", "fp32"), ("int8", "fp16")]  # of the weights, of K and V
SLOW = [("int4", "fp16"), ("bf16", "fp32"), ("int8", "fp32"), ("fp32", "fp16"), ("fp16", "fp16")]
WORDS = "To be, or not to be, that is the question: whether it is nobler in the mind to suffer".split()


@pytest.fixture(
    scope="module", params=[*FORMS, *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW)], ids="-".join
)
def toy(request: pytest.FixtureRequest) -> Iterator[Live]:
    """The toy with a pool so narrow that some of a crowd must wait and reused rows come and go."""
    weights, kv_dtype = request.param
    with serve(
        model="toy", weights=weights, kv_dtype=kv_dtype, slots=12, kv_memory=3 * 2**20, threads=2, draft_tokens=8
    ) as server:
        yield server


def body(rng: random.Random) -> dict[str, Any]:
    """Greedy or seeded, short or long, one choice or several, with every setting of the sampler now and then."""
    shared = " ".join(WORDS[: rng.choice((0, 3, 17))])
    own = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 60))))
    asked: dict[str, Any] = {
        "prompt": f"{shared} {own}",
        "max_tokens": rng.choice((1, 8, 30, 80)),
        "temperature": rng.choice((0.0, 0.7, 1.0, 1.5)),
        "seed": rng.randrange(2**32),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "stream": False,
    }
    extras: list[dict[str, Any]] = [
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logprobs": 3},
        {"stop": ["the", "\n\n"]},
        {"ignore_eos": True},
        {"logit_bias": {"10": -5, "300": 2}},
    ]
    for extra in rng.sample(extras, rng.randrange(4)):
        asked |= extra
    return asked


def choices(live: Live, asked: dict[str, Any], **fields: Any) -> str:
    """All that must be the same of an answer: text, ids, logprobs to the last digit, why it ended."""
    response = CLIENT.post(live.url + "/generate", json=asked | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    return repr((answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]))


def test_a_request_has_the_same_bytes_alone_in_crowds_and_on_reused_rows(toy: Live) -> None:
    rng = random.Random(5)
    bodies = [body(rng) for _ in range(REQUESTS)]
    alone = [choices(toy, asked, cache_prefix=False) for asked in bodies]
    assert toy.wait_idle()["pool"]["committed_bytes"] == 0

    def leave_early(seed: int) -> None:
        """Somebody who goes away at some moment, and leaves rows behind."""
        with CLIENT.stream("POST", toy.url + "/generate", json=body(random.Random(seed)) | {"stream": True}) as stream:
            for _ in zip(stream.iter_raw(), range(seed % 9), strict=False):
                pass

    for history in range(3):
        order = rng.sample(range(REQUESTS), REQUESTS)
        with ThreadPoolExecutor(10) as pool:
            leaving = [pool.submit(leave_early, 1000 * history + at) for at in range(REQUESTS // 2)]
            crowd = dict(zip(order, pool.map(lambda at: choices(toy, bodies[at]), order), strict=True))
            for left in leaving:
                left.result()
        assert [at for at in range(REQUESTS) if crowd[at] != alone[at]] == []
    counts = toy.service.engine.scheduler.counts
    assert counts.prefix_rows, "no rows were reused"


# texts of the toy since its first compiled kernels; a change of any bit would sooner or later show in one
GOLDEN = [
    (
        {"prompt": "To be, or not to be", "temperature": 0},
        " a traitor, and I'll be a\n"
        "More than a traitor, and I'll not be accused\n"
        "To make a traitor, and to accuse\n"
        "Against the tribunes of the fire",
    ),
    (
        {"prompt": "ROMEO:\nBut soft", "temperature": 0.9, "top_p": 0.9, "seed": 1},
        "-hearted slander that is my sick.\n"
        "\n"
        "JULIET:\n"
        "Happy days!\n"
        "Where sweet's my eye to-morrow should loss-scowing.\n"
        "\n"
        "Nurse:\n"
        "No, by my sword, I am from thee, a word.\n"
        "\n"
        "ROMEO",
    ),
]


def test_the_golden_texts_are_what_they_were() -> None:
    with serve(model="toy") as server:
        for asked, text in GOLDEN:
            assert server.text(**asked, max_tokens=60) == text
