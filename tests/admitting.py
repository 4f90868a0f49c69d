"""A ledger and an admission rule, without a scheduler."""

from __future__ import annotations

from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.admission import Admission, Rule
from tokenteller.server.engine.ledger import KVLedger

PAGE = 4096
FOUR_A_PAGE = KVLayout(1, 1, 256, 64)  # a K and a V lane: a row is 1 KiB in each
WINDOWED = KVLayout(2, 1, 256, 64, windows=(8, None), chunk=4)
LAYOUTS = st.sampled_from([FOUR_A_PAGE, WINDOWED, KVLayout(1, 1, 256, 64, paged=False)])
SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=6)  # prompt, rows to come


def admission_of(
    layout: KVLayout = FOUR_A_PAGE, slots: int = 4, pages: int = 1000, rule: Rule = "peak", prompt_rows: int = 1000
) -> Admission:
    """pages: in each of the two lanes."""
    return Admission(KVLedger(layout, slots, pages * 2 * PAGE), rule, prompt_rows)


def start(admission: Admission, prompt: int, growth: int) -> int | None:
    """The slot of a sequence that grows by `growth` rows after its prompt; None if the rule does not admit it."""
    demand = admission.start(prompt, prompt + growth, None)
    if demand is None:
        return None
    slot, _ = admission.ledger.allocate("x", prompt, prompt + growth, demand)
    return slot


def end(admission: Admission, slot: int) -> None:
    admission.end(slot, keep=False, by_itself=False)


def lockstep(layout: KVLayout, shapes: list[tuple[int, int]]) -> list[int]:
    """D(s): committed bytes at each step when all grow a row a step and leave when they have all they asked for."""
    last = max(growth for _, growth in shapes)
    return [
        sum(layout.committed(prompt + step) for prompt, growth in shapes if step <= growth) for step in range(last + 1)
    ]
