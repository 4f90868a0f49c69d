"""Follow one token through the toy: `python -m tokenteller.model.explain "To be"`, or time the cache with `--compare`.

Prints the shape and the meaning of every tensor on the way, recomputed with the textbook form of attention and checked
against what the decoder itself wrote to the pool.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from tokenteller.model.attention import Batch, causal_mask, rotate, scaled_dot_product
from tokenteller.model.checkpoint import Checkpoint, load
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_memory import KVLayout, size
from tokenteller.model.kv_pool import KVPool, PoolMemoryError


def show(name: str, tensor: torch.Tensor, meaning: str) -> None:
    """One line: the name, the shape, some values, and what it is."""
    values = ", ".join(f"{value:+.3f}" for value in tensor.flatten()[:4].tolist())
    print(f"{name:<14} {list(tensor.shape)!s:<20} {meaning}\n{'':<14} {values}, ...")


def batch_of(ids: list[int], start: int, slot: int = 0) -> Batch:
    """One sequence's new tokens; only the last row is sampled."""
    positions = torch.arange(start, start + len(ids))
    return Batch(torch.tensor(ids), torch.full_like(positions, slot), positions, torch.tensor([len(ids) - 1]))


@torch.inference_mode()
def explain(checkpoint: Checkpoint, text: str) -> None:
    """The way of `text` through the first layer, to the pool, and to the next token.

    Raises ValueError for a text without tokens, or with more than the context has.
    """
    decoder, tokenizer, config = checkpoint.decoder, checkpoint.tokenizer, checkpoint.config
    ids = tokenizer.encode(text)
    if not 1 <= len(ids) <= config.max_context:
        raise ValueError(f"the text has {len(ids)} tokens; it must have 1..{config.max_context}, the model's context")
    layout = KVLayout.of(config, config.max_context, chunk=len(ids))
    pool = KVPool(layout, slots=1)
    logits = decoder.forward(batch_of(ids, 0), pool)[0]  # [vocab]
    pieces = " ".join(f"{token}={tokenizer.backend.decode([token], skip_special_tokens=False)!r}" for token in ids)
    h, k, d = config.num_heads, config.num_kv_heads, config.head_dim
    print(f"{text!r} is {len(ids)} tokens: {pieces}\n")
    print(f"N={len(ids)} rows, E={config.width} width, H={h} query heads, K={k} kv heads, D={d} head_dim\n")
    print("-- layer 0: into attention")
    explain_attention(decoder, ids, pool)
    print("\n-- what the pool holds now")
    explain_memory(layout, pool, len(ids))
    print("\n-- out of the last layer")
    show("logits", logits, f"a score for each of the {config.vocab_size} tokens that may come next")
    for probability, token in zip(*logits.softmax(-1).topk(5), strict=True):
        print(f"{'':<14} {float(probability):6.1%}  {tokenizer.decode([int(token)])!r}")
    if len(ids) == config.max_context:
        print(f"\nThe next token is drawn from these and is the last: the context of {len(ids)} rows is full.")
        return
    reach = " as far back as a layer's window reaches" if any(config.windows) else ""
    print(f"\nThe next token is drawn from these, gets position {len(ids)}, and only its own row is computed: the")
    print(f"{len(ids)} rows before it are read from the pool{reach} and never computed again.")


def explain_attention(decoder: Decoder, ids: list[int], pool: KVPool) -> None:
    """Every tensor of layer 0's attention; raises AssertionError if the textbook and the pool disagree."""
    block, rows = decoder.blocks[0], len(ids)
    attention, config = block.attention, decoder.config
    x = decoder.embed(torch.tensor(ids))  # [N, E]
    show("x", x, "the tokens' embeddings, one row each")
    if decoder.positions is not None:
        x = with_positions(decoder, x, 0)
        show("x + position", x, "plus the learned row of each position, so that order counts: here is no RoPE")
    normed = block.attention_norm(x)  # [N, E]
    if config.norm == "rms":
        show("norm(x)", normed, "each row divided by its root mean square, times a learned weight")
    else:
        show("norm(x)", normed, "each row less its mean, over its standard deviation, times a weight, plus a bias")
    bias = ", plus a bias" if config.qkv_bias else ""
    show("q,k,v", attention.qkv(normed), f"one product for all three{bias}: (H + 2K) x D columns")
    q, k, v = attention.project(normed)
    each = ", each head normed" if config.qk_norm else ""
    show("q", q, f"head split{each}: what each row looks for, per query head  [N, H, D]")
    show("k", k, f"what each row offers to be found by, per kv head{each}  [N, K, D]")
    show("v", v, "what each row hands over when it is found  [N, K, D]")
    if config.rope:
        q, k = (rotate(t, *decoder.rope(torch.arange(rows))) for t in (q, k))
        show("rotated k", k, "RoPE turns pairs by position x frequency; done once, before it is written")
    keys, values = pool.keys(0, 0, rows), pool.values(0, 0, rows)  # [K, N, D]
    assert torch.allclose(keys, k.transpose(0, 1), atol=1e-5), "the pool does not hold these keys"
    group = config.group
    if group == 1:
        print(f"{'':<14} each query head has a kv head of its own")
    else:
        print(f"{'':<14} {group} query heads share one kv head: head h reads kv head h // {group}")
    shared_k, shared_v = (t.repeat_interleave(group, dim=0) for t in (keys, values))  # [H, N, D]
    mask = causal_mask(rows, rows)
    window = config.window(0)
    if window:
        mask += torch.full((rows, rows), -math.inf).tril(-window)
        print(
            f"{'':<14} this layer has a window of {window} rows: a row looks at itself and the {window - 1} before it"
        )
    show("mask", mask, "0 where a row may look, -inf where it may not: exp(-inf) is 0, while exp(0) is 1")
    scores, weights, out = scaled_dot_product(q.transpose(0, 1), shared_k, shared_v, mask)
    show("scores", scores, f"q k^T / sqrt({config.head_dim}) + mask, so that their variance is about 1")
    show("weights", weights, "softmax of each row of scores: who is listened to, sums to 1")
    show("out", out, "weights x v, per head  [H, N, D]")
    joined = out.transpose(0, 1).reshape(rows, -1)  # [N, H x D]
    show("concatenated", joined, "the heads side by side")
    show("projected", attention.out(joined), "mixed back to the model's width, added to x")


def with_positions(decoder: Decoder, x: torch.Tensor, start: int) -> torch.Tensor:
    """Embeddings [N, E] of the tokens from position `start` on, plus learned positions if the model has them."""
    if decoder.positions is None:
        return x
    return x + decoder.positions[start : start + len(x)].float()


def explain_memory(layout: KVLayout, pool: KVPool, rows: int) -> None:
    """What was written and where, by the formula, by pages, and by the kernel."""
    print("pool           [slot, layer, 2, kv_head, max_context, head_dim] =", list(pool.kv.shape))
    print(
        f"written        rows 0..{rows - 1} of slot 0: K at pool[0, layer, 0, :, row], V at pool[0, layer, 1, :, row]"
    )
    layers, heads, dim, element = layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.bytes_per_element
    formula = f"2 x {layers} layers x {heads} kv heads x {dim} head_dim x {element} bytes"
    print(f"formula        {formula} = {layout.bytes_per_token:,} bytes per token")
    kept = Counter(min(rows, window or rows) for window in layout.windows)  # rows: layers that keep so many
    if min(kept, default=rows) == rows:
        print(f"               x {rows} rows = {layout.kv_bytes(rows):,} bytes")
    else:
        parts = " + ".join(f"{count} layers x {most} rows" for most, count in kept.items())
        each = f"{layout.bytes_per_token // layers:,} bytes in each layer"
        print(f"               a layer keeps no more rows than its window has; of the {rows}:")
        print(f"               ({parts}) x {each} = {layout.kv_bytes(rows):,} bytes")
        print(f"               as yet all {rows} are there: whole pages before the window go back with later tokens")
    print(f"committed      {layout.committed(rows):,} bytes: {layout.lanes} lanes in whole pages of 4,096 bytes")
    print(f"kernel         {pool.resident_bytes():,} bytes of this mapping are resident")
    print(f"address space  {size(pool.slots * layout.slot_bytes)} for {pool.slots} slot of {layout.max_context} rows")


@torch.inference_mode()
def compare(checkpoint: Checkpoint, tokens: int) -> None:
    """Times three ways to generate: no cache, a cache that is concatenated, and the preallocated pool."""
    decoder = checkpoint.decoder
    ways: dict[str, Callable[[Decoder, int], list[float]]] = {
        "no cache": without_cache,
        "concatenated": with_concatenated_cache,
        "preallocated pool": with_pool,
    }
    print(f"{tokens} tokens, one sequence, milliseconds per token\n")
    print(f"{'':<20}{'first 64':>10}{'last 64':>10}{'all':>10}{'against the pool':>18}")
    times = {name: [1000 * seconds for seconds in way(decoder, tokens)] for name, way in ways.items()}
    pool_total = sum(times["preallocated pool"])
    for name, taken in times.items():
        first, last = statistics.median(taken[:64]), statistics.median(taken[-64:])
        print(f"{name:<20}{first:>10.2f}{last:>10.2f}{sum(taken) / tokens:>10.2f}{sum(taken) / pool_total:>17.1f}x")


def timed(tokens: int, step: Callable[[list[int]], torch.Tensor]) -> list[float]:
    """Greedy generation: step(ids so far) -> logits [1, vocab]; seconds of each step."""
    ids, seconds = [0], []
    for _ in range(tokens):
        began = time.perf_counter()
        ids.append(int(step(ids)[0].argmax()))
        seconds.append(time.perf_counter() - began)
    return seconds


def without_cache(decoder: Decoder, tokens: int) -> list[float]:
    """Every step computes all rows again."""
    pool = KVPool(KVLayout.of(decoder.config, tokens), slots=1)
    return timed(tokens, lambda ids: decoder.forward(batch_of(ids, 0), pool))


def with_pool(decoder: Decoder, tokens: int) -> list[float]:
    """Every step computes one row and writes it in place."""
    pool = KVPool(KVLayout.of(decoder.config, tokens), slots=1)
    return timed(tokens, lambda ids: decoder.forward(batch_of(ids[-1:], len(ids) - 1), pool))


def with_concatenated_cache(decoder: Decoder, tokens: int) -> list[float]:
    """Every step computes one row, and moves the whole cache to a new place that is one row longer."""
    config = decoder.config
    cache = [torch.empty(2, config.num_kv_heads, 0, config.head_dim) for _ in decoder.blocks]  # [2, K, n, D] a layer

    def step(ids: list[int]) -> torch.Tensor:
        at = len(ids) - 1
        cos, sin = decoder.rope(torch.tensor([at]))
        x = with_positions(decoder, decoder.embed(torch.tensor(ids[-1:])), at)  # [1, E]
        for layer, block in enumerate(decoder.blocks):
            q, k, v = block.attention.project(block.attention_norm(x))
            if config.rope:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            row = torch.stack((k, v)).transpose(1, 2)  # [2, K, 1, D]
            cache[layer] = torch.cat((cache[layer], row), dim=2)[:, :, -block.attention.window :]
            keys, values = (t.repeat_interleave(config.group, dim=0) for t in cache[layer])  # [H, n, D]
            mask = torch.zeros(1, keys.shape[1])  # all that is kept may be looked at
            out = scaled_dot_product(q.transpose(0, 1), keys, values, mask)[2]  # [H, 1, D]
            x = x + block.attention.out(out.reshape(1, -1))
            x = x + block.mlp(block.mlp_norm(x))
        return decoder.head(decoder.norm(x))  # [1, vocab]

    return timed(tokens, step)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenteller.model.explain", description=__doc__)
    parser.add_argument("text", nargs="?", default="To be", help="the text to follow")
    parser.add_argument("--model", default="toy", help="'toy' or a checkpoint directory")
    parser.add_argument("--compare", action="store_true", help="time no cache, concatenated cache and pool instead")
    parser.add_argument("--tokens", type=int, default=512, help="tokens to generate for --compare")
    arguments = parser.parse_args()
    try:
        arguments.text.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        print(f"explain: the text is not UTF-8: {error}", file=sys.stderr)
        return 2
    try:
        checkpoint = load(arguments.model, "fp32")
        most = checkpoint.config.max_context
        if arguments.compare and not 1 <= arguments.tokens <= most:
            raise ValueError(f"--tokens must be in 1..{most}, the model's context")
        if arguments.compare:
            compare(checkpoint, arguments.tokens)
        else:
            explain(checkpoint, arguments.text)
    except (ValueError, PoolMemoryError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
