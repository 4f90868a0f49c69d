"""The sampler against a reference: its definition in plain Python, one token at a time and without shortcuts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tokenteller.model import sampler, top_p
from tokenteller.model.sampler import LOWEST_LOGPROB, Draw, LogitsError, Sampled, SamplingParams, logprobs, uniform
from tokenteller.model.top_p import token_weights

V = 40
EDGE = 1e-9  # sums in another order may differ by this much, so anything closer to its threshold may go either way


def sample(logits: NDArray[np.float32], params: SamplingParams, choice: int, position: int, **history: Any) -> Sampled:
    """The token of one row, alone."""
    outcome = sampler.sample(logits[None], [Draw(params, choice, position, **history)])[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def reference_row(logits: NDArray[np.float32], params: SamplingParams, history: dict[str, Any]) -> NDArray[np.float64]:
    """Logits after penalties, bias and bans, one token at a time."""
    row = [float(value) for value in logits]
    prompt, output = history.get("prompt", []), history.get("output", [])
    for id in set(prompt) | set(output):
        row[id] = row[id] / params.repetition_penalty if row[id] > 0 else row[id] * params.repetition_penalty
    for id in set(output):
        row[id] -= params.presence_penalty + params.frequency_penalty * output.count(id)
    for id, bias in params.logit_bias:
        row[id] += bias
    allowed = history.get("allowed")
    for id in range(len(row)):
        if id in history.get("forbidden", ()) or (allowed is not None and not allowed[id]):
            row[id] = -math.inf
    return np.array(row)


def reference(
    logits: NDArray[np.float32], params: SamplingParams, u: float, history: dict[str, Any]
) -> tuple[int, bool]:
    """The token by definition, and whether rounding could have changed it."""
    row = reference_row(logits, params, history)
    order = sorted(range(len(row)), key=lambda id: (-row[id], id))
    if params.temperature < 1e-5 or params.top_k == 1:
        return order[0], False
    weight = {id: math.exp((row[id] - row[order[0]]) / params.temperature) for id in order}
    close = False
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    if params.top_p < 1:
        total, mass, kept = math.fsum(weight[id] for id in order), 0.0, []
        for id in order:
            close |= abs(mass / total - params.top_p) < EDGE
            if mass >= params.top_p * total:
                break
            kept.append(id)
            mass += weight[id]
        close |= abs(mass / total - params.top_p) < EDGE
        order = kept
    if params.min_p > 0:
        close |= any(abs(weight[id] - params.min_p) < EDGE for id in order)
        order = [id for id in order if weight[id] >= params.min_p]
    order.sort()
    total, mass = math.fsum(weight[id] for id in order), 0.0
    drawn = order[-1]
    for id in order:
        mass += weight[id]
        close |= abs(mass / total - u) < EDGE
        if u * total < mass:
            drawn = id
            break
    return drawn, close


def random_case(rng: np.random.Generator) -> tuple[NDArray[np.float32], SamplingParams, dict[str, Any]]:
    """A mix of parameters, each of them off half the time, with ties and banned tokens."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    logits = rng.normal(0, rng.choice([0.1, 1, 5, 30]), V).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties
    if rng.random() < 0.1:
        logits[rng.integers(V, size=5)] = -np.inf
    logits[0] = max(logits[0], -3.0)
    bias_ids = rng.choice(V, size=3, replace=False)
    params = SamplingParams(
        temperature=maybe(float(rng.choice([0.0, 1e-4, 0.1, 0.7, 2.0])), 1.0),
        top_k=maybe(int(rng.integers(-1, V + 5)), 0),
        top_p=maybe(float(rng.uniform(0.01, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 1)), 0.0),
        seed=int(rng.integers(2**63)),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple((int(id), float(rng.uniform(-100, 100))) for id in bias_ids), ()),
    )
    history = {
        "prompt": rng.integers(V, size=rng.integers(1, 20)).tolist(),
        "output": rng.integers(V, size=rng.integers(0, 20)).tolist(),
        "forbidden": maybe(set(rng.integers(1, V, size=3).tolist()), ()),
        "allowed": maybe(rng.random(V) < 0.6, None),
    }
    if history["allowed"] is not None:
        history["allowed"][0] = True
    return logits, params, history


def check_cases(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    compared = 0
    for _ in range(count):
        logits, params, history = random_case(rng)
        choice, position = int(rng.integers(8)), int(rng.integers(1000))
        token = sample(logits, params, choice, position, **history).token_id
        wanted, close = reference(logits, params, uniform(params.seed, choice, position), history)
        assert token == wanted or close, (logits, params, history)
        compared += not close
    assert compared > 0.99 * count


def test_any_mix_of_parameters_draws_the_reference_token() -> None:
    check_cases(1_000, seed=1)


@pytest.mark.slow
def test_ten_thousand_mixes_draw_the_reference_token() -> None:
    check_cases(10_000, seed=2)


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    rng = np.random.default_rng(6)
    cases = [random_case(rng) for _ in range(200)]
    draws: list[Draw | Exception] = [Draw(params, 0, at, **history) for at, (_, params, history) in enumerate(cases)]
    rows = np.stack([logits for logits, _, _ in cases])
    alone = [sampler.sample(rows[at : at + 1], [draw])[0] for at, draw in enumerate(draws)]
    assert sampler.sample(rows, draws) == alone
    assert sampler.sample(rows[::-1], draws[::-1]) == alone[::-1]
    rows[3, 7], failed = math.nan, ValueError("before")  # a broken or failed row affects no other
    outcomes = sampler.sample(np.vstack((rows, rows[:5])), [*draws[:9], failed, *draws[10:]])
    assert isinstance(outcomes[3], LogitsError) and outcomes[9] is failed
    assert [outcomes[at] for at in range(200) if at not in (3, 9)] == alone[:3] + alone[4:9] + alone[10:]


@pytest.mark.parametrize("vocab", [3, 64, 65, 511, 512, 513, 5_000])
def test_cuts_without_a_full_sort_equal_cuts_with_one(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for case in range(40):
        logits = np.round(rng.normal(0, 3, vocab), case % 3).astype(np.float32)
        params = SamplingParams(
            temperature=float(rng.choice([0.2, 1, 3])),
            top_k=int(rng.choice([0, 2, 9, 50, 300])),
            top_p=float(rng.choice([1, 0.999, 0.5])),
            min_p=float(rng.choice([0, 0, 0.01, 0.5])),
            seed=case,
        )
        wanted, close = reference(logits, params, uniform(case, 0, 7), {})
        assert sample(logits, params, 0, 7).token_id == wanted or close


def wide_row(rng: np.random.Generator) -> NDArray[Any]:
    """A row of a large vocabulary: flat, peaked, with ties, with banned tokens, or already adjusted to float64."""
    row = rng.normal(0, rng.choice([0.01, 0.3, 1, 3, 6]), int(rng.choice([8_192, 8_193, 32_000, 49_152])))
    row = row.astype(rng.choice([np.float32, np.float64]))
    if rng.random() < 0.3:
        row = np.round(row, int(rng.integers(0, 3)))
    if rng.random() < 0.2:
        row[rng.random(len(row)) < rng.choice([0.1, 0.9, 0.999])] = -np.inf
    row[int(rng.integers(len(row)))] = row.max() + 0.1
    return row


def wide_draw(row: NDArray[Any], params: SamplingParams, u: float) -> int | None:
    highest = float(row.max())
    weights = token_weights(row, highest, params.temperature)
    return top_p.draw(row, weights, params.top_p * float(weights.sum()), highest, params.temperature, u)


def test_top_p_on_a_wide_row_draws_the_token_that_sorting_draws() -> None:
    rng = np.random.default_rng(4)
    answered = 0
    for seed in range(150):
        row, u = wide_row(rng), uniform(seed, 0, 1)
        params = SamplingParams(
            temperature=float(rng.choice([0.1, 0.7, 1, 2, 50])), top_p=float(rng.choice([0.1, 0.5, 0.9, 0.95, 0.999]))
        )
        highest = float(row.max())
        kept = sampler._kept(row, highest, params)
        assert kept is not None
        by_sorting = kept[sampler._inverted(token_weights(row[kept], highest, params.temperature), u)]
        token_id = wide_draw(row, params, u)
        assert token_id is None or token_id == by_sorting
        answered += token_id is not None
        drawn = sampler._drawn(row, highest, Draw(replace(params, seed=seed), 0, 1))
        assert drawn == by_sorting
    assert answered > 120


def test_top_p_has_no_answer_where_rounding_could_decide() -> None:
    """Of 16,384 equal tokens, half the mass ends exactly between two of them."""
    row = np.zeros(16_384, np.float32)
    assert wide_draw(row, SamplingParams(top_p=0.5), 0.3) is None
    assert wide_draw(row, SamplingParams(top_p=0.50001), 0.3) == int(0.3 * 8193)
    assert wide_draw(row, SamplingParams(top_p=0.50001), 0.0) is None, "the target is the very edge of the first token"
    assert sample(row, SamplingParams(top_p=0.5), 0, 1).token_id < 8192


DISTRIBUTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=12),
    SamplingParams(temperature=1.7, top_p=0.8),
    SamplingParams(min_p=0.1, repetition_penalty=1.3, presence_penalty=0.5),
]


def check_distribution(params: SamplingParams, draws: int) -> None:
    logits = np.random.default_rng(5).normal(0, 1.5, V).astype(np.float32)
    history = {"prompt": [1, 2, 3], "output": [3, 4]}
    counts = np.zeros(V)
    for position in range(draws):
        counts[sample(logits, params, 0, position, **history).token_id] += 1
    row = reference_row(logits, params, history)
    weight = np.exp((row - row.max()) / params.temperature)
    order = np.argsort(-row, kind="stable")
    if params.top_k:
        weight[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(weight[order]) - weight[order]
        weight[order[before >= params.top_p * weight.sum()]] = 0
    weight[weight < params.min_p] = 0
    expected = draws * weight / weight.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_squared = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # chi-squared has mean f and variance 2f; five deviations out is about one in a million
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    check_distribution(params, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_a_hundred_thousand_draws_follow_the_distribution(params: SamplingParams) -> None:
    check_distribution(params, 100_000)


@given(st.integers(0, 2**64 - 1), st.integers(0, 7), st.integers(0, 2**20))
def test_random_numbers_lie_in_zero_to_one_and_are_repeatable(seed: int, choice: int, position: int) -> None:
    u = uniform(seed, choice, position)
    assert 0 <= u < 1 and u == uniform(seed, choice, position)


def test_random_numbers_of_choices_and_positions_are_independent() -> None:
    table = np.array([[uniform(7, choice, position) for position in range(2_000)] for choice in range(4)])
    assert len(np.unique(table)) == table.size
    assert np.all(np.abs(np.corrcoef(table) - np.eye(4)) < 0.1)
    assert abs(np.corrcoef(table[0][:-1], table[0][1:])[0, 1]) < 0.1


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_greedy_is_argmax_whatever_the_seed(temperature: float) -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        logits = rng.normal(0, 10, V).astype(np.float32)
        params = SamplingParams(temperature=temperature, seed=seed)
        assert sample(logits, params, 0, seed).token_id == int(logits.argmax())


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1)])
def test_ties_go_to_the_lower_id(params: SamplingParams) -> None:
    logits = np.zeros(V, np.float32)
    logits[[9, 4, 30]] = 2.0
    assert {sample(logits, replace(params, seed=seed), 0, 3).token_id for seed in range(50)} == {4}
    two = replace(params, temperature=1.0, top_k=2)
    assert {sample(logits, replace(two, seed=seed), 0, 3).token_id for seed in range(50)} == {4, 9}


def test_top_k_beyond_the_vocabulary_or_minus_one_is_off() -> None:
    logits = np.random.default_rng(3).normal(0, 1, V).astype(np.float32)
    for seed in range(50):
        plain = sample(logits, SamplingParams(seed=seed), 0, 1)
        for top_k in (-1, 0, V, V + 1, 10_000):
            assert sample(logits, SamplingParams(seed=seed, top_k=top_k), 0, 1) == plain


def test_tiny_temperatures_and_huge_logits_stay_finite() -> None:
    logits = np.array([3e38, -3e38, 2.9e38, -np.inf], np.float32)
    with np.errstate(all="raise", under="ignore"):
        for temperature in (1e-4, 1e-2, 1.0, 100.0):
            assert sample(logits, SamplingParams(temperature=temperature), 0, 1).token_id == 0


@given(st.integers(0, 63), st.sampled_from([math.nan, math.inf]), st.booleans())
def test_one_value_that_is_not_finite_makes_the_row_an_error(at: int, value: float, greedy: bool) -> None:
    logits = np.random.default_rng(at).normal(0, 1, 64).astype(np.float32)
    logits[at] = value
    with pytest.raises(LogitsError, match="not finite"):
        sample(logits, SamplingParams(temperature=0.0 if greedy else 1.0, top_p=0.5), 0, 1)


def test_repetition_penalty_makes_a_repeat_less_likely_whatever_the_sign() -> None:
    for shift in (-20.0, 0.0, 20.0):
        logits = np.random.default_rng(1).normal(0, 1, V).astype(np.float32) + np.float32(shift)
        best = int(logits.argmax())
        for seen in ({"prompt": [best]}, {"output": [best]}):
            harsh = SamplingParams(temperature=0, repetition_penalty=1.0 + abs(shift) / 5 + 3.0)
            assert sample(logits, harsh, 0, 1, **seen).token_id != best
            none = SamplingParams(temperature=0, repetition_penalty=1.0)
            assert sample(logits, none, 0, 1, **seen).token_id == best


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = np.array([1.0, 0.0], np.float32)
    for params in (
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=1.5),
    ):
        assert sample(logits, params, 0, 1, prompt=[0, 0]).token_id == 0
        assert sample(logits, params, 0, 1, output=[0]).token_id == 1
    mild = SamplingParams(temperature=0, frequency_penalty=0.6)
    assert [sample(logits, mild, 0, 1, output=[0] * count).token_id for count in range(3)] == [0, 0, 1]


def test_logit_bias_can_force_and_ban_a_token() -> None:
    logits = np.random.default_rng(1).normal(0, 5, V).astype(np.float32)
    best = int(logits.argmax())
    assert sample(logits, SamplingParams(temperature=0, logit_bias=((5, 100.0),)), 0, 1).token_id == 5
    banned = SamplingParams(temperature=2, logit_bias=((best, -100.0),))
    assert all(sample(logits, replace(banned, seed=seed), 0, 1).token_id != best for seed in range(200))


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.full(V, -1.0, np.float32)
    logits[-5:] = 9.0  # all the mass is on banned tokens, up to the last id
    allowed = np.ones(V, np.bool_)
    allowed[-5:] = False
    for seed in range(200):
        for params in (SamplingParams(seed=seed), SamplingParams(seed=seed, top_k=7, top_p=0.99)):
            assert sample(logits, params, 0, 1, allowed=allowed).token_id < V - 5
            assert sample(logits, params, 0, 1, forbidden=set(range(V - 5, V))).token_id < V - 5


def test_the_largest_random_number_draws_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product with the total rounds up to the total, while the last ids have probability 0."""
    monkeypatch.setattr("tokenteller.model.sampler.uniform", lambda *_: 1.0 - 2.0**-53)
    rng = np.random.default_rng(1)
    for vocab, lasts in ((V, range(1, V)), (1100, (1, 511, 512, 513, 1024, 1025, 1099))):
        for last in lasts:
            logits = rng.normal(0, 1, vocab).astype(np.float32)
            logits[last:] = -np.inf
            assert sample(logits, SamplingParams(), 0, 1).token_id < last


def test_logprobs_ignore_the_sampling_parameters() -> None:
    logits = np.random.default_rng(2).normal(0, 4, V).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    history = {"prompt": [1], "output": [int(logits.argmax())], "forbidden": {3}}
    for params in (
        SamplingParams(logprobs=5),
        SamplingParams(logprobs=5, temperature=0),
        SamplingParams(logprobs=5, temperature=0.3, top_k=2, top_p=0.5, min_p=0.2),
        SamplingParams(logprobs=5, repetition_penalty=2, presence_penalty=2, logit_bias=((7, 50.0),)),
    ):
        drawn = sample(logits, params, 0, 1, **history)
        assert drawn.logprobs is not None
        assert drawn.logprobs.chosen == pytest.approx(exact[drawn.token_id], abs=1e-12)
        assert [id for id, _ in drawn.logprobs.top] == np.argsort(-exact, kind="stable")[:5].tolist()
        assert [value for _, value in drawn.logprobs.top] == pytest.approx(np.sort(exact)[::-1][:5], abs=1e-12)


def test_logprobs_are_finite_and_as_many_as_requested() -> None:
    logits = np.array([0.0, -np.inf, -3e38, 1.0], np.float32)
    for count in (0, 1, 3, 4, 20):
        entry = logprobs(logits, 1, count)
        assert entry.chosen == LOWEST_LOGPROB and len(entry.top) == min(count, 4)
        assert all(math.isfinite(value) for _, value in entry.top)
    assert sample(logits, SamplingParams(), 0, 1).logprobs is None
