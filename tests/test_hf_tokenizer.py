"""The tokenizer files of a Hugging Face checkpoint: what they mean, and that errors name file and key."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import BOS, VOCAB, byte_tokenizer, damaged, edited, random_llama
from tokenizers import Tokenizer, models, processors

from tokenteller.model.chat import ChatTemplateError
from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.formats.hf_tokenizer import load_tokenizer
from tokenteller.model.formats.stored import read_config

NAMED_TEMPLATE = '{"chat_template": [{"name": "default", "template": "a"}, %s]}'
TOO_MANY_WORDS = Tokenizer(models.WordLevel({"foo": 0, "a": 264}, unk_token="foo")).to_str()
WORDS_WITHOUT_UNKNOWN = Tokenizer(models.WordLevel({"foo": 0, "bar": 1}, unk_token="zz")).to_str()


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", None, "config.json: "),
        ("config.json", "{", "config.json: "),
        ("config.json", "[1]", "config.json: "),
        ("tokenizer.json", None, "tokenizer.json: "),
        ("tokenizer.json", "{}", "tokenizer.json: model: missing or not an object"),
        ("generation_config.json", '{"eos_token_id": [264]}', "generation_config.json: 'eos_token_id' has 264"),
        ("generation_config.json", '{"eos_token_id": "2"}', "'eos_token_id' has '2'"),
        (
            "tokenizer_config.json",
            '{"chat_template": 3}',
            "tokenizer_config.json: key 'chat_template' is 3; it must be a text",
        ),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: it is nested too deeply"),
        ("generation_config.json", "[" * 100_000, "generation_config.json: it is nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json: key 'eos_token' is 5"),
        ("tokenizer_config.json", '{"eos_token": ["x"]}', "tokenizer_config.json: key 'eos_token' is ['x']"),
        ("tokenizer_config.json", '{"bos_token": {"content": 5}}', "key 'bos_token.content' is 5; it must be a text"),
        (
            "tokenizer_config.json",
            '{"eos_token": "\\ud800"}',
            "'eos_token' is '\\ud800'; it contains half a character",
        ),
        ("tokenizer_config.json", NAMED_TEMPLATE % 1, "tokenizer_config.json: key 'chat_template' has 1 at 1"),
        ("tokenizer_config.json", NAMED_TEMPLATE % '{"name": ["x"]}', "key 'chat_template.name' is ['x']"),
        ("tokenizer_config.json", NAMED_TEMPLATE % '{"template": 1}', "key 'chat_template.template' is 1"),
        (
            "tokenizer_config.json",
            '{"chat_template": "a\\n{% if %}"}',
            "tokenizer_config.json: 'chat_template': the chat template failed in line 2: ",
        ),
        ("chat_template.jinja", "{{ messages.__class__.__base__ }}", "chat_template.jinja: 'chat_template': "),
        ("chat_template.jinja", "{% for i in range(3000000) %}{% endfor %}", "chat_template.jinja: 'chat_template': "),
        ("tokenizer.json", TOO_MANY_WORDS, "tokenizer.json: has tokens up to number 264, but the model has 264"),
        ("tokenizer.json", WORDS_WITHOUT_UNKNOWN, "tokenizer.json: WordLevel error: Missing [UNK] token"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 1e400}', "'num_attention_heads' is inf"),
        ("model.safetensors", None, "model.safetensors: no such file; weights are read from safetensors or GGUF"),
        ("model.safetensors", "junk", "model.safetensors: "),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, file: str, content: str | None, named: str) -> None:
    directory = random_llama(tmp_path)
    (directory / file).unlink(missing_ok=True)
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load(str(directory), "fp32")
    assert named in str(caught.value) and str(directory) in str(caught.value) and "\n" not in str(caught.value)


def post_processed() -> str:
    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return backend.to_str()


@pytest.mark.parametrize(
    ("file", "whole"),
    [
        (
            "tokenizer_config.json",
            '{"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": "a"}',
        ),
        ("tokenizer_config.json", NAMED_TEMPLATE % '{"name": "b", "template": "c"}'),
        ("generation_config.json", '{"eos_token_id": [257, 3]}'),
        ("tokenizer.json", post_processed()),
    ],
)
def test_any_value_in_a_tokenizer_file_works_or_is_one_line_that_names_the_file(
    tmp_path: Path, file: str, whole: str
) -> None:
    config = read_config(str(random_llama(tmp_path)))
    for what, damage in damaged(json.loads(whole)):
        (tmp_path / file).write_text(json.dumps(damage))
        try:
            tokenizer = load_tokenizer(tmp_path, config)
            assert max(tokenizer.encode("abc <|eos|>"), default=0) < VOCAB, what
            with suppress(ChatTemplateError):
                tokenizer.encode_chat([{"role": "user", "content": "x"}])
        except CheckpointError as error:
            assert str(error).startswith(f"{tmp_path / file}: ") and "\n" not in str(error), what


class TestStopsAndTemplate:
    def test_a_template_that_only_refuses_a_conversation_is_no_fault_of_the_checkpoint(self, tmp_path: Path) -> None:
        directory = random_llama(tmp_path)
        (directory / "chat_template.jinja").write_text("{{ raise_exception('a system message, please') }}")
        tokenizer = load(str(directory), "fp32").tokenizer
        with pytest.raises(ChatTemplateError, match="a system message, please"):
            tokenizer.encode_chat([{"role": "user", "content": "x"}])

    def test_stop_ids_are_the_union_of_config_generation_config_and_tokenizer(self, tmp_path: Path) -> None:
        directory = edited(random_llama(tmp_path), {}, eos_token_id=5)
        (directory / "generation_config.json").write_text('{"eos_token_id": [6, 259]}')
        assert load(str(directory), "fp32").tokenizer.stop_ids == {5, 6, 257, 259}

    @pytest.mark.parametrize(
        ("single", "bos"), [("$A", None), ("<|bos|> $A", 256), ("<|bos|> $A <|eos|>", 256), ("$A <|eos|>", None)]
    )
    def test_bos_is_what_the_tokenizer_itself_puts_in_front_and_nothing_is_put_behind(
        self, tmp_path: Path, single: str, bos: int | None
    ) -> None:
        directory = random_llama(tmp_path)
        backend = byte_tokenizer()
        specials = [("<|bos|>", 256), ("<|eos|>", 257)]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
        backend.save(str(directory / "tokenizer.json"))
        tokenizer = load(str(directory), "fp32").tokenizer
        assert tokenizer.bos_id == bos
        assert tokenizer.encode("ab") == ([] if bos is None else [bos]) + [97, 98]

    def test_the_chat_template_may_be_a_file_a_text_or_one_of_several(self, tmp_path: Path) -> None:
        directory = random_llama(tmp_path)
        settings = directory / "tokenizer_config.json"
        settings.write_text(
            '{"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]}'
        )
        assert load(str(directory), "fp32").tokenizer.chat_template == "b"
        settings.write_text('{"chat_template": "c"}')
        assert load(str(directory), "fp32").tokenizer.chat_template == "c"
        (directory / "chat_template.jinja").write_text("d")
        assert load(str(directory), "fp32").tokenizer.chat_template == "d"


@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_format_is_named_with_the_remedy(tmp_path: Path, file: str) -> None:
    directory = random_llama(tmp_path)
    (directory / "tokenizer.json").rename(directory / file)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: no such file \({file} alone cannot be read"):
        load(str(directory), "fp32")
