"""What files call the decoder's tensors. The decoder's own names are those of Llama in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tokenteller.model.config import ModelConfig
from tokenteller.model.packing import Matrix


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of the decoder comes from: a tensor of the file, and what has to be done to it."""

    tensor: str
    transposed: bool = False
    third: int | None = None  # one of q, k and v stacked in one tensor
    rotary_heads: int = 0  # of so many heads, rows in rotary pairs (2i, 2i + 1) go to (i, i + head_dim / 2)

    def take(self, tensor: Matrix) -> Matrix:
        if self.transposed and isinstance(tensor, torch.Tensor):
            tensor = tensor.t()
        rows = tensor.shape[0]
        if self.third is not None:
            size = -(-rows // 3)
            return tensor[size * self.third : size * (self.third + 1)]
        if self.rotary_heads and rows % (2 * self.rotary_heads) == 0:  # the decoder reports other shapes
            order = np.arange(rows).reshape(self.rotary_heads, -1, 2).swapaxes(1, 2).reshape(rows)
            return tensor[torch.from_numpy(order)] if isinstance(tensor, torch.Tensor) else tensor[order]
        return tensor


_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # derived values that older files carry


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one kind of file names modules. To add one, write its `modules`."""

    block: str  # the prefix of block N, with {} for N
    modules: Mapping[str, str] = field(default_factory=dict)  # the file's name -> ours; others are the same
    fused_qkv: str = ""  # the module that holds q, k and v in one
    transposed: bool = False  # matrices of blocks are stored [in, out]
    rotary_heads: Mapping[str, int] = field(default_factory=dict)  # the file's module -> heads, see Source

    def sources(self, tensors: Iterable[str]) -> dict[str, Source]:
        """Our name -> source, for all tensors of a file. A tensor of an unknown module keeps its name."""
        return {name: source for tensor in tensors if not _BUFFERS.search(tensor) for name, source in self._of(tensor)}

    def _of(self, tensor: str) -> list[tuple[str, Source]]:
        module, _, kind = tensor.removeprefix("transformer.").rpartition(".")
        block = re.fullmatch(self.block.format(r"(\d+)") + "(.+)", module)
        at, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
        source = Source(
            tensor,
            transposed=self.transposed and "." in module and kind == "weight",
            rotary_heads=self.rotary_heads.get(module, 0),
        )
        if module == self.fused_qkv:
            return [
                (f"{at}self_attn.{letter}_proj.{kind}", replace(source, third=third))
                for third, letter in enumerate("qkv")
            ]
        return [(f"{at}{self.modules.get(module, module)}.{kind}", source)]

    def spell(self, name: str) -> str:
        """The file's name for one of ours, for messages."""
        module, _, kind = name.rpartition(".")
        block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        at, module = (self.block.format(block[1]), block[2]) if block else ("", module)
        if self.fused_qkv and re.fullmatch(r"self_attn\.[qkv]_proj", module):
            return f"{at}{self.fused_qkv}.{kind}"
        theirs = {ours: theirs for theirs, ours in self.modules.items()}
        return f"{at}{theirs.get(module, module)}.{kind}"


LLAMA = TensorNames("model.layers.{}.")  # also Mistral and Qwen
GPT2 = TensorNames(
    "h.{}.",
    {
        "wte": "model.embed_tokens",
        "wpe": "model.embed_positions",
        "ln_f": "model.norm",
        "ln_1": "input_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    fused_qkv="attn.c_attn",
    transposed=True,
)
_GGUF = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def safetensors_names(model_type: str) -> TensorNames:
    return GPT2 if model_type == "gpt2" else LLAMA


def gguf_names(architecture: str, config: ModelConfig) -> TensorNames:
    """Only the llama architecture stores the rows of q and k in rotary pairs."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if architecture == "llama" else {}
    return TensorNames("blk.{}.", _GGUF, "attn_qkv" if architecture == "gpt2" else "", rotary_heads=heads)
