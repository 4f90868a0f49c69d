"""The toy checkpoint: small, loadable by other libraries, and a real language model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

TOY = Path(__file__).parent.parent / "model" / "toy"
BOS, EOS = 0, 1

# From the last tenth of the text, on which neither weights nor merges were trained.
HELD_OUT = """BAPTISTA:
Nay, let them go, a couple of quiet ones.

GREMIO:
Went they not quickly, I should die with laughing.

TRANIO:
Of all mad matches never was the like.

LUCENTIO:
Mistress, what's your opinion of your sister?

BIANCA:
That, being mad herself, she's madly mated.

GREMIO:
I warrant him, Petruchio is Kated.

BAPTISTA:
Neighbours and friends, though bride and
bridegroom wants
For to supply the places at the table,
You know there wants no junkets at the feast.
Lucentio, you shall supply the bridegroom's place:
And let Bianca take her sister's room.

TRANIO:
Shall sweet Bianca practise how to bride it?

BAPTISTA:
She shall, Lucentio. Come, gentlemen, let's go.

"""
HELD_OUT_BITS = 2.0  # per byte; the model card has the figure for the whole held-out tenth


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOY / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()


def test_the_folder_is_at_most_eight_megabytes() -> None:
    size = sum(path.stat().st_size for path in TOY.iterdir() if path.is_file())
    assert size <= 8_000_000


def test_weights_are_float16_and_tied() -> None:
    from safetensors import safe_open

    with safe_open(TOY / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_kv_takes_2048_bytes_per_token_in_float32() -> None:
    config = json.loads((TOY / "config.json").read_text())
    elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert elements * 4 == 2048
    assert config["max_position_embeddings"] >= 1024


@pytest.mark.parametrize(
    "text",
    [
        "",
        "To be, or not to be",
        " leading and trailing ",
        "tabs\tand\r\nline ends\n\n\n  ",
        "Zażółć gęślą jaźń, größer, naïve",
        "漢字かな交じり文 한국어 العربية עברית",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\ufeff",
        "\x00\x01\x7f\u2028\U0010ffff",
        "".join(map(chr, range(256))),
        "12345678901 3.14 a_b <|no special|>",
    ],
)
def test_any_text_survives_a_round_trip_through_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_all_256_bytes_are_in_a_vocabulary_of_1024(tokenizer: Tokenizer) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert tokenizer.get_vocab_size() == 1024
    assert all(tokenizer.token_to_id(symbol) is not None for symbol in ByteLevel.alphabet())


def test_encoding_adds_one_bos_and_no_eos(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    ids = tokenizer.encode("To be").ids
    assert ids[0] == BOS and ids.count(BOS) == 1 and EOS not in ids
    assert tokenizer.encode("To be", add_special_tokens=False).ids == ids[1:]
    assert AutoTokenizer.from_pretrained(TOY)("To be").input_ids == ids


def chat_template(**options: bool) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(json.loads((TOY / "tokenizer_config.json").read_text())["chat_template"])


CHAT = [
    {"role": "system", "content": "Verona. A public place."},
    {"role": "user", "content": "Good morrow."},
    {"role": "assistant", "content": "Is the day so young?"},
    {"role": "user", "content": "But new struck nine."},
]


@pytest.mark.parametrize("trim", [False, True])
def test_a_conversation_becomes_a_scene_between_romeo_and_juliet(tokenizer: Tokenizer, trim: bool) -> None:
    render = chat_template(trim_blocks=trim, lstrip_blocks=trim).render
    scene = (
        "<|bos|>Verona. A public place.\n\n"
        "ROMEO:\nGood morrow.\n\nJULIET:\nIs the day so young?\n\nROMEO:\nBut new struck nine.\n\n"
    )
    assert render(messages=CHAT, bos_token="<|bos|>", add_generation_prompt=False) == scene
    prompt = render(messages=CHAT, bos_token="<|bos|>", add_generation_prompt=True)
    assert prompt == scene + "JULIET:\n"
    assert tokenizer.encode(prompt, add_special_tokens=False).ids.count(BOS) == 1


def test_transformers_renders_the_same_chat() -> None:
    from transformers import AutoTokenizer

    ours = chat_template().render(messages=CHAT, bos_token="<|bos|>", add_generation_prompt=True)
    theirs = AutoTokenizer.from_pretrained(TOY).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert theirs == ours


def test_chat_refuses_an_unknown_role() -> None:
    with pytest.raises(jinja2.TemplateError, match="tool"):
        chat_template().render(messages=[{"role": "tool", "content": ""}], bos_token="", add_generation_prompt=True)


@torch.no_grad()
def test_held_out_text_takes_fewer_than_two_bits_per_byte(model: Any, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode(HELD_OUT).ids])
    nats = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert nats / math.log(2) / len(HELD_OUT.encode()) < HELD_OUT_BITS


@torch.no_grad()
def test_the_last_quarter_of_the_context_is_not_worse_than_the_first(model: Any, tokenizer: Tokenizer) -> None:
    """Most of the training used short windows; a model that never saw the late positions fails here."""
    ids = torch.tensor([tokenizer.encode(HELD_OUT * 4).ids[:1024]])
    assert ids.shape[1] == 1024
    nats = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert nats[-256:].mean() <= nats[:256].mean()


@torch.no_grad()
def test_greedy_text_is_made_of_english_words(model: Any, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode("ROMEO:\n").ids])
    text = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=60)[0, ids.shape[1] :].tolist())
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) >= 5
    assert sum(word in {"the", "of", "and", "i", "you", "to", "my", "a", "that", "be", "is"} for word in words) >= 3


@torch.no_grad()
def test_a_document_starts_with_text_and_can_end_after_a_speech(model: Any, tokenizer: Tokenizer) -> None:
    """After <|bos|> comes text, not <|eos|>; after a whole speech <|eos|> has a real chance."""
    first = model(torch.tensor([[BOS]])).logits[0, -1].softmax(0)
    ended = model(torch.tensor([tokenizer.encode("ROMEO:\nGood morrow, cousin.\n\n").ids])).logits[0, -1].softmax(0)
    assert first[EOS] < 0.02
    assert 0.05 < ended[EOS] < 0.6
