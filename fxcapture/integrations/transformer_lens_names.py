"""Where transformers' models have the values that TransformerLens has hooks for.

The names are those of TransformerLens's ``HookedTransformer``
(https://transformerlensorg.github.io/TransformerLens, "Activation names").  For each
family of models, by its ``config.model_type``, a name leads to a target and to which
value of it: ``"output"``, ``"input"``, or the argument of a function call by position.
``{}`` stands for the number of the block.  Two names are not in the table, since the
attention kernel decides about them: scores and pattern.
"""

from __future__ import annotations

__all__ = ["ATTENTION", "FAMILIES", "KERNELS", "Place"]

#: (target, which value)
Place = tuple[str, int | str]

_LLAMA: dict[str, Place] = {
    "hook_embed": ("{base}embed_tokens", "output"),
    "blocks.{}.hook_resid_pre": ("{base}layers.{}", "input"),
    "blocks.{}.hook_resid_mid": ("{base}layers.{}::add[0]", "output"),
    "blocks.{}.hook_resid_post": ("{base}layers.{}", "output"),
    "blocks.{}.hook_attn_out": ("{base}layers.{}.self_attn", "output"),
    "blocks.{}.hook_mlp_out": ("{base}layers.{}.mlp", "output"),
    "blocks.{}.attn.hook_q": ("{base}layers.{}.self_attn.q_proj", "output"),
    "blocks.{}.attn.hook_k": ("{base}layers.{}.self_attn.k_proj", "output"),
    "blocks.{}.attn.hook_v": ("{base}layers.{}.self_attn.v_proj", "output"),
    "blocks.{}.mlp.hook_pre": ("{base}layers.{}.mlp.gate_proj", "output"),
    "blocks.{}.mlp.hook_pre_linear": ("{base}layers.{}.mlp.up_proj", "output"),
    "blocks.{}.mlp.hook_post": ("{base}layers.{}.mlp.down_proj", "input"),
}
_GPT2: dict[str, Place] = {
    "hook_embed": ("{base}wte", "output"),
    "hook_pos_embed": ("{base}wpe", "output"),
    "blocks.{}.hook_resid_pre": ("{base}h.{}", "input"),
    "blocks.{}.hook_resid_mid": ("{base}h.{}::add[0]", "output"),
    "blocks.{}.hook_resid_post": ("{base}h.{}", "output"),
    "blocks.{}.hook_attn_out": ("{base}h.{}.attn", "output"),
    "blocks.{}.hook_mlp_out": ("{base}h.{}.mlp", "output"),
    "blocks.{}.mlp.hook_pre": ("{base}h.{}.mlp.c_fc", "output"),
    "blocks.{}.mlp.hook_post": ("{base}h.{}.mlp.act", "output"),
}
_NEOX: dict[str, Place] = {
    "hook_embed": ("{base}embed_in", "output"),
    "blocks.{}.hook_resid_pre": ("{base}layers.{}", "input"),
    "blocks.{}.hook_resid_post": ("{base}layers.{}", "output"),
    "blocks.{}.hook_attn_out": ("{base}layers.{}.attention", "output"),
    "blocks.{}.hook_mlp_out": ("{base}layers.{}.mlp", "output"),
    "blocks.{}.mlp.hook_pre": ("{base}layers.{}.mlp.dense_h_to_4h", "output"),
    "blocks.{}.mlp.hook_post": ("{base}layers.{}.mlp.act", "output"),
}

#: Model type to its names.
FAMILIES: dict[str, dict[str, Place]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
}
#: Model type to its attention modules.
ATTENTION = {
    "llama": "{base}layers.{}.self_attn",
    "mistral": "{base}layers.{}.self_attn",
    "qwen2": "{base}layers.{}.self_attn",
    "qwen3": "{base}layers.{}.self_attn",
    "gemma": "{base}layers.{}.self_attn",
    "gpt2": "{base}h.{}.attn",
    "gpt_neox": "{base}layers.{}.attention",
}
#: What the attention kernel decides: name to (function call, which value).
KERNELS: dict[str, dict[str, Place]] = {
    "sdpa": {
        "blocks.{}.attn.hook_rot_q": ("scaled_dot_product_attention", 0),
        "blocks.{}.attn.hook_rot_k": ("scaled_dot_product_attention", 1),
        "blocks.{}.attn.hook_z": ("scaled_dot_product_attention", "output"),
    },
    "eager": {
        "blocks.{}.attn.hook_rot_q": ("matmul[0]", 0),
        "blocks.{}.attn.hook_rot_k": ("matmul[0]", 1),
        "blocks.{}.attn.hook_z": ("matmul[1]", "output"),
    },
}
