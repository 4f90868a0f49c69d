"""Laws of text: what was sent is a prefix of the final text, characters stay whole, stop strings never leak."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from checkpoints import BOS, EOS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from tokenteller.model.sampler import SamplingParams
from tokenteller.model.tokenizer import Tokenizer, byte_symbols
from tokenteller.server.api.stream import Choice, Delta, StopMatcher
from tokenteller.server.engine.sequence import Request, Token

BYTES = Tokenizer(byte_tokenizer(), bos_id=None, stop_ids=[EOS])
ids = st.lists(st.integers(0, 263), max_size=60)


def spm(**strip: int) -> Tokenizer:
    """Byte-fallback tokens for all bytes, then words with the SentencePiece space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<s>": 256, "</s>": 257, "▁I": 258, "▁am": 259, "▁here": 260, "!": 261, "猫": 262, "▁": 263}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip["left"], 0)] if strip else []))
    return Tokenizer(backend, bos_id=256, stop_ids=[257])


SPM = spm(left=1)


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token completes, and what the flush brings at the end."""
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(id) for id in token_ids), detokenizer.flush()]


@given(ids)
def test_byte_level_text_is_what_the_tokenizer_itself_decodes(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTES, token_ids)) == BYTES.backend.decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=20), st.lists(st.sampled_from([256, 257, 258, 259, 260, 261, 262, 263]), max_size=8))
def test_byte_fallback_text_is_what_the_tokenizer_itself_decodes(text: str, words: list[int]) -> None:
    token_ids = [words[0] if words else 256, *text.encode(), *words]
    assert "".join(pieces(SPM, token_ids)) == SPM.backend.decode(token_ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 263), max_size=60), st.sampled_from([BYTES, SPM]))
def test_what_was_sent_is_a_prefix_of_the_text_of_any_longer_run(token_ids: list[int], tokenizer: Tokenizer) -> None:
    whole = tokenizer.decode(token_ids)
    sent = ""
    for piece in pieces(tokenizer, token_ids):
        sent += piece
        assert whole.startswith(sent)
    assert sent == whole


@given(st.text(min_size=1))
def test_a_character_is_sent_whole_and_as_soon_as_it_is(text: str) -> None:
    sent = pieces(BYTES, list(text.encode()))
    assert ("".join(sent) == text and "\ufffd" not in "".join(sent)) or "\ufffd" in text
    assert sent[-1] == ""
    at = 0
    for char in text:
        at += len(char.encode())
        assert sent[at - 1] == char


@given(st.lists(st.integers(0x80, 0xFF), max_size=200))
def test_bytes_that_are_no_text_hold_back_at_most_three(token_ids: list[int]) -> None:
    detokenizer, sent = BYTES.detokenizer(), ""
    for count, id in enumerate(token_ids, 1):
        sent += detokenizer.push(id)
        assert len(bytes(token_ids[:count])) - len(sent.encode()) <= 3


def test_a_character_split_over_tokens_comes_out_once_and_whole() -> None:
    text = "A🙂B猫C"
    assert [piece for piece in pieces(BYTES, list(text.encode())) if piece] == list(text)


def test_spaces_between_words_stay_and_the_first_is_dropped_once() -> None:
    assert pieces(SPM, [258, 259, 260]) == ["I", " am", " here", ""]
    assert pieces(spm(), [258, 259, 260]) == [" I", " am", " here", ""]
    assert SPM.decode([256, 263, 258]) == " I"


def test_special_tokens_leave_no_text_unless_asked() -> None:
    assert BYTES.decode([BOS, 65, EOS]) == "A"
    assert BYTES.decode([BOS, 65, EOS], skip_special=False) == "<|bos|>A<|eos|>"
    assert BYTES.token_text(EOS) == "<|eos|>" and BYTES.token_text(0xF0) == "\ufffd" and BYTES.token_text(263) == ""


def test_a_word_that_was_added_to_the_vocabulary_is_itself() -> None:
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(word, special=False) for word in ("<think>", "café", "a b")])
    tokenizer = Tokenizer(backend, bos_id=None, stop_ids=[EOS])
    assert tokenizer.encode("x<think>café") == [120, 260, 261]
    assert tokenizer.decode([260, 261, 262]) == "<think>caféa b"


def test_a_decoder_that_is_not_understood_is_refused() -> None:
    backend = byte_tokenizer()
    for decoder in (decoders.WordPiece(), decoders.CTC()):
        backend.decoder = decoder
        with pytest.raises(ValueError, match="neither byte-level nor byte-fallback"):
            Tokenizer(backend, bos_id=None, stop_ids=[])


def test_a_long_text_is_encoded_while_other_threads_run() -> None:
    encoding, gaps = threading.Event(), [0.0]

    def beat() -> None:
        last = time.monotonic()
        while not encoding.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    beating = threading.Thread(target=beat)
    beating.start()
    began = time.monotonic()
    assert len(BYTES.encode("x y" * 400_000)) == 1_200_000
    took = time.monotonic() - began
    encoding.set()
    beating.join()
    assert max(gaps) < took / 2


def test_byte_symbols_are_those_of_byte_level_bpe() -> None:
    assert sorted(byte_symbols()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    encoded = BYTES.backend.encode("é \n~", add_special_tokens=False)
    assert [byte_symbols()[id] for id in encoded.ids] == encoded.tokens


# Stop strings

letters = st.text(alphabet="ab", min_size=1, max_size=6)


@given(st.lists(letters, max_size=4), st.lists(st.text(alphabet="ab", max_size=5), max_size=12))
def test_text_ends_where_the_first_stop_string_begins_however_it_is_cut(stops: list[str], parts: list[str]) -> None:
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
def test_text_is_held_back_only_while_it_may_become_a_stop_string(stops: list[str], whole: str) -> None:
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


def test_a_long_repetition_is_held_back_to_one_short_of_the_stop_string() -> None:
    matcher, sent = StopMatcher(["a" * 255 + "b"] * 16), 0
    for count in range(1, 401):
        piece, stopped = matcher.push("a" * 10)
        sent += len(piece)
        assert not stopped and sent == max(0, 10 * count - 255)
    assert matcher.flush() == ("a" * 255, False)


# A choice: tokens to deltas


def choice(stops: Sequence[str] = (), tokenizer: Tokenizer = BYTES, **sampling: Any) -> Choice:
    request = Request("r", (1,), 100, SamplingParams(**sampling), stop_ids=frozenset({EOS}))
    return Choice(0, tokenizer, request, stops)


def played(one: Choice, token_ids: Sequence[int], reason: str = "length") -> list[Delta]:
    """The deltas of a choice whose reader takes each as soon as it is ready."""
    deltas = []
    for id in token_ids:
        one.take(Token("r", 0, id))
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
        slow.take(Token("r", 0, id))
        if read:
            late.append(slow.ready())
        if slow.end:
            break
    if slow.end is None:
        slow.finish("length")
    late.append(slow.ready())
    assert "".join(d.text for d in late if d) == "".join(d.text for d in deltas)
    assert slow.end == quick.end


def test_an_end_token_is_no_text_and_counts() -> None:
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
def test_the_verdict_about_stopping_is_made_on_the_text(script: str, stops: list[str], text: str, reason: str) -> None:
    one = choice(stops)
    deltas = played(one, list(script.encode()))
    assert "".join(delta.text for delta in deltas) == text
    assert one.end and one.end.reason == reason


def test_min_tokens_lets_no_stop_string_end_the_text_before() -> None:
    one = choice(["a"], min_tokens=3)
    deltas = played(one, list(b"aaaba"))
    assert "".join(delta.text for delta in deltas) == "aaab" and one.end and one.end.reason == "stop"


def test_text_held_back_is_sent_when_a_stream_fails() -> None:
    one = choice(["<end>"])
    for id in b"abc<e":
        one.take(Token("r", 0, id))
    one.flush()
    delta = one.ready()
    assert delta and delta.text == "abc<e"
