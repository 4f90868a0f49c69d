"""A broken tokenizer.json is refused with the key at fault, whatever is broken in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_llama

from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.tokenizer_file import TokenizerFileError, read_tokenizer

TOY = Path(__file__).parent.parent / "model" / "toy" / "tokenizer.json"
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}


def setting(*keys: Any, to: Any) -> Callable[[dict[str, Any]], Any]:
    """Sets document[key][key]... to a value."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("model", "merges", 3, to=5), "model.merges[3]: 5 is not a pair of tokens"),
        (setting("model", "merges", 3, to=["a"]), "model.merges[3]: ['a'] is not a pair of tokens"),
        (setting("model", "merges", 7, to=["zz", "a"]), "model.merges[7]: 'zz' is not in the vocabulary"),
        (setting("model", "merges", to=["q z", "a z z"]), "model.merges[0]: 'qz' is not in the vocabulary"),
        (setting("model", "merges", to=5), "model: "),
        (setting("model", "vocab", "a", to="x"), "model.vocab['a']: 'x' is not a token id"),
        (setting("model", "vocab", "a", to=-1), "model.vocab['a']: -1 is not a token id"),
        (setting("model", "vocab", to=[]), "model.vocab: missing or not an object"),
        (setting("model", "type", to="Foo"), "model: not a known form"),
        (setting("model", "dropout", to=7), "model.dropout: Dropout should be between 0 and 1"),
        (setting("model", to=None), "model: missing or not an object"),
        (setting("decoder", to={"type": "Nope"}), "decoder: not a known form"),
        (setting("normalizer", to=5), "normalizer: not a known form"),
        (setting("post_processor", to={"type": "X"}), "post_processor: not a known form"),
        (setting("pre_tokenizer", "pretokenizers", 1, to=SPLIT), "pre_tokenizer.pretokenizers[1]: Oniguruma error"),
        (setting("added_tokens", 1, "id", to="x"), 'added_tokens[1]: invalid type: string "x", expected u32'),
        (setting("added_tokens", 1, to={}), "added_tokens[1]: missing field `"),
        (setting("added_tokens", to=5), "added_tokens: invalid type"),
        (setting("version", to="9"), "version: Unknown tokenizer version '9'"),
        (setting("truncation", to=7), "truncation: invalid type"),
    ],
)
def test_an_error_begins_with_the_key(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    document = json.loads(TOY.read_text())
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerFileError) as error:
        read_tokenizer(tmp_path / "tokenizer.json")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "message"), [(b"{", "not JSON: "), (b"\xff", "not JSON: "), (b"[]", "model: ")])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerFileError, match=message):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_sound_file_is_read_as_the_library_reads_it() -> None:
    assert json.loads(read_tokenizer(TOY).to_str()) == json.loads(TOY.read_text())


def test_a_broken_tokenizer_is_reported_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = random_llama(tmp_path)
    monkeypatch.setattr("tokenteller.model.checkpoint.Decoder", lambda *_: pytest.fail("weights were read"))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": "x"}}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: model\.vocab\['a'\]: 'x' is not a token id"):
        load(str(directory), "fp32")
    (directory / "tokenizer.json").write_text(TOY.read_text())
    (directory / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has tokens up to|chat_template\.jinja: .* line 2"):
        load(str(directory), "fp32")
