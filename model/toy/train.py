"""Trains the toy checkpoint: a 3-million-parameter Llama on Shakespeare, small enough to live in the repository.

    python model/toy/train.py --data tinyshakespeare.txt

Writes config, weights (float16), tokenizer and model card next to this file. Runs for a fixed number of steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BOS, EOS = 0, 1
SPECIALS = ["<|bos|>", "<|eos|>"]
VOCABULARY = 1024
CONTEXT = 1024
SEED = 1611

TOKENS_PER_STEP = 2048
SHORT_WINDOW = 256  # cheaper attention and more varied batches than with full windows
END_OF_DOCUMENT = 0.25  # chance that a speech ends a document
MERGE_DROPOUT = 0.1
SPEECHES_PER_DROPOUT = 64
DROPOUT = 0.05
MUON_RATE, ADAM_RATE = 0.02, 0.003
WEIGHT_DECAY = 0.05
WARM_UP = 40

# As in Llama 3's tokenizer, punctuation includes the line ends after it, so ",\n" and ":\n" are one token.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Newlines are written as expressions, so trim_blocks and lstrip_blocks make no difference.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'ROMEO:\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'JULIET:\\n' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ raise_exception('Unknown role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'JULIET:\\n' }}{% endif %}"
)


# ---------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE with all 256 bytes, so any UTF-8 text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def drop_merges(tokenizer: Tokenizer, chance: float, rng: random.Random) -> Tokenizer:
    """A copy that splits text into smaller tokens. The library's own BPE dropout cannot be seeded."""
    description = json.loads(tokenizer.to_str())
    description["model"]["merges"] = [merge for merge in description["model"]["merges"] if rng.random() >= chance]
    return Tokenizer.from_str(json.dumps(description))


# --------------------------------------------------------------------------------------------------------------- data


def encode_documents(tokenizer: Tokenizer, text: str, merge_dropout: float, rng: random.Random) -> Tensor:
    """The text as one row of tokens, with new document boundaries and (with dropout) new merges on every call."""
    speeches = [speech + "\n\n" for speech in text.split("\n\n")]
    ids: list[int] = [BOS]
    for i in range(0, len(speeches), SPEECHES_PER_DROPOUT):
        encoder = drop_merges(tokenizer, merge_dropout, rng) if merge_dropout else tokenizer
        for encoding in encoder.encode_batch(speeches[i : i + SPEECHES_PER_DROPOUT], add_special_tokens=False):
            ids += encoding.ids
            if rng.random() < END_OF_DOCUMENT:
                ids += [EOS, BOS]
    return torch.tensor(ids)


def line_starts(ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Positions of the first token of each line or document."""
    ends_line = torch.tensor([tokenizer.decode([i]).endswith("\n") for i in range(VOCABULARY)])
    previous, current = ids[:-1], ids[1:]
    begins = (ends_line[previous] & ~ends_line[current] & (current != EOS)) | (previous == BOS)
    return begins.nonzero().flatten() + 1


def batches(tokenizer: Tokenizer, text: str, window: int, merge_dropout: float, rng: random.Random) -> Iterator[Tensor]:
    """Endless batches [B, window + 1]. As in serving, each row is <|bos|> and then text from the start of a line."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    size = TOKENS_PER_STEP // window
    while True:
        ids = encode_documents(tokenizer, text, merge_dropout, rng)
        starts = line_starts(ids, tokenizer)
        cuts = torch.arange(int(starts[0]) + rng.randrange(window), len(ids) - window, window)
        cuts = starts[torch.searchsorted(starts, cuts, right=True) - 1]  # back to the start of the line
        rows = ids[cuts[:, None] + torch.arange(-1, window)]
        rows[:, 0] = BOS
        rows = rows[torch.randperm(len(rows), generator=generator)]
        yield from rows[: len(rows) // size * size].split(size)


# -------------------------------------------------------------------------------------------------------------- model


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def drop_out(module: nn.Module, _: object, output: Tensor) -> Tensor:
    """Forward hook that adds residual dropout, which Llama does not have."""
    return F.dropout(output, DROPOUT, module.training)


class Muon(torch.optim.Optimizer):
    """Momentum with updates orthogonalised by Newton-Schulz steps (Jordan et al., 2024), in float32.

    `torch.optim.Muon` uses bfloat16, eight times slower than float32 on a CPU without bfloat16 instructions.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = self.orthogonal(weight.grad.lerp(mean, group["momentum"]))
                scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    @staticmethod
    def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
        """Brings all singular values close to 1 with an odd polynomial of the matrix."""
        x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        x = x / (x.norm() + 1e-7)
        for _ in range(steps):
            gram = x @ x.T
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
        return x if matrix.shape[0] <= matrix.shape[1] else x.T


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, steps: int, full_steps: int) -> int:
    """Short windows with merge dropout, then `full_steps` of full contexts without it. Returns tokens seen."""
    rng = random.Random(SEED)
    short = batches(tokenizer, text, SHORT_WINDOW, MERGE_DROPOUT, rng)
    full = batches(tokenizer, text, CONTEXT, 0.0, rng)
    optimizers = make_optimizers(model)
    schedules = [
        LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP)))
        for optimizer in optimizers
    ]
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: (drop_out(m, a, out[0]), *out[1:]))
        layer.mlp.register_forward_hook(drop_out)
    model.train()
    seen, average = 0, math.log(VOCABULARY)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)) as progress:
        task = progress.add_task("train", total=steps, loss=average)
        for step in range(steps):
            rows = next(short if step < steps - full_steps else full)
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            seen += rows[:, 1:].numel()
            average += 0.02 * (loss.item() - average)
            progress.update(task, advance=1, loss=average)
    return seen


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, stride: int = CONTEXT // 2) -> float:
    """Scores each token of `text` once, after <|bos|> and at least half a context of text (less at the beginning)."""
    model.eval()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    nats, scored, begin = 0.0, 0, 0
    while scored < len(ids):
        end = min(begin + CONTEXT - 1, len(ids))
        row = torch.tensor([[BOS, *ids[begin:end]]])
        logits = model(input_ids=row, use_cache=False).logits[0, :-1]
        nats += F.cross_entropy(logits[scored - begin :], row[0, 1 + scored - begin :], reduction="sum").item()
        scored, begin = end, begin + stride
    return nats / len(text.encode()) / math.log(2)


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, new_tokens: int = 120) -> str:
    torch.manual_seed(SEED)
    prompt_ids = torch.tensor([tokenizer.encode(prompt).ids])
    ids = model.generate(prompt_ids, do_sample=True, temperature=0.8, top_k=0, top_p=0.95, max_new_tokens=new_tokens)
    return tokenizer.decode(ids[0].tolist())


# --------------------------------------------------------------------------------------------------------- checkpoint


def write_checkpoint(directory: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # transformers makes it readable by its owner only
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


CARD = """# The toy checkpoint

A very small Llama that writes like Shakespeare. It ships with the repository, so the server starts without a download,
and is served by the same code as every other checkpoint.

| | |
|---|---|
| Architecture | `LlamaForCausalLM`: 4 layers, width 256, 8 query and 2 KV heads of 32, MLP 688, tied embeddings |
| Parameters | {parameters:,}, stored as float16 ({megabytes:.1f} MB) |
| Context | {context:,} tokens; K and V take 2 x 4 x 2 x 32 x 4 = 2,048 bytes per token in float32 |
| Tokenizer | byte-level BPE, {vocabulary:,} tokens, any UTF-8 text; `<|bos|>` = 0 (before a prompt), `<|eos|>` = 1 |
| Data | `{data}` ({size:,} bytes, sha256 `{digest}`), the public-domain text of Shakespeare's plays |
| Held out | the last tenth: **{bits:.3f} bits per byte** ({windows}) |
| Training | {steps:,} steps, {seen:,} tokens, {minutes:.0f} minutes on {threads} thread(s) of a shared CPU |

It stands in for a real model in load, memory and protocol. It knows no facts and follows no instructions.

## Train again

    pip install -e '.[dev]'
    python model/toy/train.py --data tinyshakespeare.txt

Seed and number of steps are fixed, so the same machine and library versions give the same weights.

## Documents and chat

In training, a random quarter of the speeches end a document (`<|eos|><|bos|>` after the blank line), so the model ends
its answers now and then. The chat template turns a conversation into a scene: the user speaks as `ROMEO:`, the
assistant as `JULIET:`, a system message is copied unchanged, and a blank line follows each. Unknown roles are an error.

    <|bos|>ROMEO:
    Good morrow, cousin.

    JULIET:

## Sample

Temperature 0.8, top-p 0.95, starting from "To be":

{sample}

## Licence

The data are in the public domain. The weights are under the licence of this repository.
"""


def write_card(directory: Path, data: Path, model: LlamaForCausalLM, **facts: object) -> None:
    content = data.read_bytes()
    card = CARD.format(
        parameters=model.num_parameters(),
        megabytes=(directory / "model.safetensors").stat().st_size / 1e6,
        context=CONTEXT,
        vocabulary=VOCABULARY,
        data=data.name,
        size=len(content),
        digest=hashlib.sha256(content).hexdigest(),
        windows=f"windows of {CONTEXT:,} tokens, stride {CONTEXT // 2}, measured on the stored float16 weights",
        **facts,
    )
    (directory / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="plain text; the last tenth is held out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)

    text = arguments.data.read_text()
    cut = len(text) * 9 // 10
    tokenizer = train_tokenizer(text[:cut])
    model = build_model()
    began = time.monotonic()
    seen = train(model, tokenizer, text[:cut], arguments.steps, full_steps=arguments.steps // 4)
    minutes = (time.monotonic() - began) / 60

    model.half()  # measure what is stored
    write_checkpoint(arguments.out, model, tokenizer)
    model.float()
    write_card(
        arguments.out,
        arguments.data,
        model,
        steps=arguments.steps,
        seen=seen,
        minutes=minutes,
        threads=arguments.threads,
        bits=bits_per_byte(model, tokenizer, text[cut:]),
        sample=textwrap.indent(sample(model, tokenizer, "To be").rstrip(), "    "),
    )
    print((arguments.out / "README.md").read_text())


if __name__ == "__main__":
    main()
