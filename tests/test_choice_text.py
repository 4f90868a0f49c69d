"""Text of a choice: stop sequences never leak, every token is sent once, and slow readers get the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from checkpoints import EOS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.tokenizer import Tokenizer
from tokenteller.server.text.choice import ChoiceText, Delta
from tokenteller.server.text.stop_sequences import StopMatcher

BYTES = Tokenizer(byte_tokenizer(), bos_id=None, stop_ids=[EOS])

# Stop sequences

letters = st.text(alphabet="ab", min_size=1, max_size=6)


@given(st.lists(letters, max_size=4), st.lists(st.text(alphabet="ab", max_size=5), max_size=12))
def test_text_ends_where_the_first_stop_sequence_begins_however_it_is_split(stops: list[str], parts: list[str]) -> None:
    matcher, whole = StopMatcher(stops), "".join(parts)
    begins = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    sent, stopped = "", False
    for part in parts:
        text, stopped = matcher.push(part)
        sent += text
        assert whole[: min(begins, default=len(whole))].startswith(sent), "what came out is never taken back"
        if stopped:
            break
    if not stopped:
        text, stopped = matcher.flush()
        sent += text
    assert stopped == bool(begins)
    assert sent == whole[: min(begins, default=len(whole))]


@given(st.lists(letters, min_size=1, max_size=3), st.text(alphabet="abc", max_size=30))
def test_text_is_held_back_only_while_it_may_become_a_stop_sequence(stops: list[str], whole: str) -> None:
    matcher, sent, fed = StopMatcher(stops), "", ""
    for char in whole:
        text, stopped = matcher.push(char)
        if stopped:
            return
        sent, fed = sent + text, fed + char
        held = fed[len(sent) :]
        assert (
            not held
            or any(held in stop[: len(held)] or stop in held for stop in stops)
            or any(stop.startswith(held[at:]) for stop in stops for at in range(len(held)))
        )
        assert len(held) < sum(map(len, stops)) + 1


def test_near_misses_are_released() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(part) for part in ("abc<", "en", "d", "x")] == [
        ("abc", False),
        ("", False),
        ("", False),
        ("<endx", False),
    ]
    assert matcher.push("<en") == ("", False)
    assert matcher.flush() == ("<en", False)


def test_a_long_repetition_is_held_back_to_one_short_of_the_stop_sequence() -> None:
    matcher, sent = StopMatcher(["a" * 255 + "b"] * 16), 0
    for count in range(1, 401):
        piece, stopped = matcher.push("a" * 10)
        sent += len(piece)
        assert not stopped and sent == max(0, 10 * count - 255)
    assert matcher.flush() == ("a" * 255, False)


# A choice: from tokens to deltas


def choice(stops: Sequence[str] = (), min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(0, BYTES.detokenizer(), stops=stops, end_ids=frozenset({EOS}), min_tokens=min_tokens)


def played(one: ChoiceText, token_ids: Sequence[int], reason: str = "length") -> list[Delta]:
    """The deltas of a choice that is read after every token."""
    deltas = []
    for id in token_ids:
        one.add(id)
        deltas.append(one.ready())
        if one.end:
            break
    if one.end is None:
        one.finish(reason)
    deltas.append(one.ready())
    return [delta for delta in deltas if delta]


@given(st.lists(st.integers(0, 260), max_size=50), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_deltas_carry_each_token_once_with_the_text_that_it_begins(token_ids: list[int], stops: list[str]) -> None:
    one = choice(stops)
    deltas = played(one, token_ids)
    assert one.end
    flat = [piece.token_id for delta in deltas for piece in delta.pieces]
    assert flat == token_ids[: one.end.completion_tokens]
    sent = 0
    for at, delta in enumerate(deltas):
        begin, sent = sent, sent + len(delta.text)
        for piece in delta.pieces:
            assert piece.offset <= sent
            assert piece.offset < sent or at == len(deltas) - 1, "a token does not come before its text"
        assert delta.text or at == len(deltas) - 1
        assert not delta.pieces or delta.pieces[0].offset >= begin or at == len(deltas) - 1 or not delta.text


@given(
    st.lists(st.integers(0, 260), max_size=40),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=3),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_a_slow_reader_gets_the_same_text_as_a_quick_one(
    token_ids: list[int], stops: list[str], reads: list[bool]
) -> None:
    quick, slow = choice(stops), choice(stops)
    deltas, late = played(quick, token_ids), []
    for id, read in zip(token_ids, reads, strict=False):
        slow.add(id)
        if read:
            late.append(slow.ready())
        if slow.end:
            break
    if slow.end is None:
        slow.finish("length")
    late.append(slow.ready())
    assert "".join(d.text for d in late if d) == "".join(d.text for d in deltas)
    assert slow.end == quick.end


def test_an_end_token_counts_but_is_not_text() -> None:
    one = choice()
    deltas = played(one, [65, EOS], reason="stop")
    assert "".join(delta.text for delta in deltas) == "A"
    assert one.end and one.end.reason == "stop" and one.end.completion_tokens == 2


@pytest.mark.parametrize(
    ("script", "stops", "text", "reason"),
    [
        ("onetwothreefour", ["twothree"], "one", "stop"),
        ("out>>>END\nmore", [">>>END", ">>>END\n"], "out", "stop"),
        ("abc<", ["<end>"], "abc<", "length"),
        ("6789", ["6"], "", "stop"),
        ("a\n\nb\r\nc\n", [], "a\n\nb\r\nc\n", "length"),
        ("abcd", ["bc", "abcd"], "", "stop"),
        ("abcx", ["bc", "abcd"], "a", "stop"),
        ("abc", ["bc", "abcd"], "a", "stop"),
    ],
)
def test_stopping_is_decided_on_the_text(script: str, stops: list[str], text: str, reason: str) -> None:
    one = choice(stops)
    deltas = played(one, list(script.encode()))
    assert "".join(delta.text for delta in deltas) == text
    assert one.end and one.end.reason == reason


def test_no_stop_sequence_ends_the_text_before_min_tokens() -> None:
    one = choice(["a"], min_tokens=3)
    deltas = played(one, list(b"aaaba"))
    assert "".join(delta.text for delta in deltas) == "aaab" and one.end and one.end.reason == "stop"


def test_text_held_back_is_sent_when_a_stream_fails() -> None:
    one = choice(["<end>"])
    for id in b"abc<e":
        one.add(id)
    one.flush()
    delta = one.ready()
    assert delta and delta.text == "abc<e"
