"""Keys of config.json that no reader asked for: refused, ignored with a warning, or harmless."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from tokenteller.model.formats.keys import Keys

log = logging.getLogger("tokenteller.model")


def refuse_unread(keys: Keys) -> None:
    """Refuses unread keys that change the maths, and warns about unknown ones."""
    unread = [key for key in keys.unread() if key not in _HARMLESS]
    for key in unread:
        value = keys.get(key)
        if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
            raise keys.wrong(key, "it changes the maths and is not supported")
    unknown = [keys.inside + key for key in unread if key not in _NEUTRAL]
    if unknown:
        _warn_once(f"ignoring unknown config keys: {', '.join(unknown)}")


@cache
def _warn_once(message: str) -> None:
    """The same config is read more than once, for the plan and to load it."""
    log.warning(message)


# Keys that change the maths in some models -> the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_intermediate_size": (),
    "mup_enabled": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}

# Keys about training, other tasks, or the file itself.
_HARMLESS = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout attn_pdrop auto_map bos_token_id
    chunk_size_feed_forward decoder_start_token_id dtype embd_pdrop eos_token_id hidden_dropout id2label
    initializer_range is_decoder is_llama_config label2id model_type n_ctx output_attentions output_hidden_states
    pad_token_id pretraining_tp problem_type reorder_and_upcast_attn resid_pdrop return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params torch_dtype
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
    """.split()
)
