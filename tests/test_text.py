"""Detokenisation: sent text is a prefix of the final text, and characters are sent whole, as soon as possible."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import tokenizers
from checkpoints import BOS, EOS, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from tokenteller.model.tokenizer import Tokenizer, byte_symbols

BYTES = Tokenizer(byte_tokenizer(), bos_id=None, stop_ids=[EOS])
ids = st.lists(st.integers(0, 263), max_size=60)


def spm(**strip: int) -> Tokenizer:
    """All byte-fallback tokens, then some words with SentencePiece's space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<s>": 256, "</s>": 257, "▁I": 258, "▁am": 259, "▁here": 260, "!": 261, "猫": 262, "▁": 263}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip["left"], 0)] if strip else []))
    return Tokenizer(backend, bos_id=256, stop_ids=[257])


SPM = spm(left=1)


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token completes, then what flush returns."""
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(id) for id in token_ids), detokenizer.flush()]


@given(ids)
def test_byte_level_text_equals_what_the_library_decodes(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTES, token_ids)) == BYTES.backend.decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=20), st.lists(st.sampled_from([256, 257, 258, 259, 260, 261, 262, 263]), max_size=8))
def test_byte_fallback_text_equals_what_the_library_decodes(text: str, words: list[int]) -> None:
    token_ids = [words[0] if words else 256, *text.encode(), *words]
    assert "".join(pieces(SPM, token_ids)) == SPM.backend.decode(token_ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 263), max_size=60), st.sampled_from([BYTES, SPM]))
def test_sent_text_is_a_prefix_of_the_final_text(token_ids: list[int], tokenizer: Tokenizer) -> None:
    whole = tokenizer.decode(token_ids)
    sent = ""
    for piece in pieces(tokenizer, token_ids):
        sent += piece
        assert whole.startswith(sent)
    assert sent == whole


@given(st.text(min_size=1))
def test_a_character_is_sent_as_soon_as_it_is_complete(text: str) -> None:
    sent = pieces(BYTES, list(text.encode()))
    assert ("".join(sent) == text and "\ufffd" not in "".join(sent)) or "\ufffd" in text
    assert sent[-1] == ""
    at = 0
    for char in text:
        at += len(char.encode())
        assert sent[at - 1] == char


@given(st.lists(st.integers(0x80, 0xFF), max_size=200))
def test_at_most_three_bytes_are_held_back_even_if_they_are_invalid(token_ids: list[int]) -> None:
    detokenizer, sent = BYTES.detokenizer(), ""
    for count, id in enumerate(token_ids, 1):
        sent += detokenizer.push(id)
        assert len(bytes(token_ids[:count])) - len(sent.encode()) <= 3


def test_a_character_split_over_tokens_is_sent_once() -> None:
    text = "A🙂B猫C"
    assert [piece for piece in pieces(BYTES, list(text.encode())) if piece] == list(text)


def test_only_the_first_leading_space_is_dropped() -> None:
    assert pieces(SPM, [258, 259, 260]) == ["I", " am", " here", ""]
    assert pieces(spm(), [258, 259, 260]) == [" I", " am", " here", ""]
    assert SPM.decode([256, 263, 258]) == " I"


def test_special_tokens_are_left_out_unless_requested() -> None:
    assert BYTES.decode([BOS, 65, EOS]) == "A"
    assert BYTES.decode([BOS, 65, EOS], skip_special=False) == "<|bos|>A<|eos|>"
    assert BYTES.token_text(EOS) == "<|eos|>" and BYTES.token_text(0xF0) == "\ufffd" and BYTES.token_text(263) == ""


def test_words_added_to_the_vocabulary_decode_to_themselves() -> None:
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(word, special=False) for word in ("<think>", "café", "a b")])
    tokenizer = Tokenizer(backend, bos_id=None, stop_ids=[EOS])
    assert tokenizer.encode("x<think>café") == [120, 260, 261]
    assert tokenizer.decode([260, 261, 262]) == "<think>caféa b"


def test_an_unsupported_decoder_is_refused() -> None:
    backend = byte_tokenizer()
    for decoder in (decoders.WordPiece(), decoders.CTC()):
        backend.decoder = decoder
        with pytest.raises(ValueError, match="neither byte-level nor byte-fallback"):
            Tokenizer(backend, bos_id=None, stop_ids=[])


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
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
