"""One small model for each architecture, with every threshold inside the prompt and no two widths alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggml.written import N_VOCAB, Shape, Written

D, H, K, W, FF = 48, 4, 2, 16, 40  # stream, heads, key heads, head width (H * W != D), feed-forward
CONTEXT = 64


def dimensions(**more: Any) -> dict[str, Any]:  # noqa: ANN401
    """The keys that every architecture has."""
    return {
        "block_count": 3,
        "context_length": CONTEXT,
        "embedding_length": D,
        "feed_forward_length": FF,
        "vocab_size": N_VOCAB,
        "attention.head_count": H,
        "attention.head_count_kv": K,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def width(w: int = W) -> dict[str, Any]:
    """The keys of heads of this width that turn as a whole."""
    return {"attention.key_length": w, "attention.value_length": w, "rope.dimension_count": w}


RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
NORM = {"attention.layer_norm_epsilon": 1e-5}
BASE = {"rope.freq_base": 500.0}


def weights(**stems: Shape) -> dict[str, Shape]:
    """Names of weights and their shapes."""
    return {f"{stem}.weight": shape for stem, shape in stems.items()}


def biases(**stems: Shape) -> dict[str, Shape]:
    """Names of biases and their shapes."""
    return {f"{stem}.bias": shape for stem, shape in stems.items()}


def outside(*, tied: bool = False, norm_bias: bool = False, **more: Shape) -> dict[str, Shape]:
    """Embedding, last norm and head."""
    found = weights(token_embd=(N_VOCAB, D), output_norm=(D,), **more)
    found |= {} if tied else weights(output=(N_VOCAB, D))
    return found | (biases(output_norm=(D,)) if norm_bias else {})


def attention(d: int = D, h: int = H, k: int = K, w: int = W) -> dict[str, Shape]:
    """The four maps of attention."""
    return weights(attn_q=(h * w, d), attn_k=(k * w, d), attn_v=(k * w, d), attn_output=(d, h * w))


def gated(d: int = D, ff: int = FF) -> dict[str, Shape]:
    """The three maps of a gated feed-forward part."""
    return weights(ffn_gate=(ff, d), ffn_up=(ff, d), ffn_down=(d, ff))


LEAST_CONTEXT = 256  # llama.cpp never opens a shorter one
NARROW = D // H  # the width of heads where llama.cpp gives an architecture none of their own
PRE = weights(attn_norm=(D,), ffn_norm=(D,))
NARROW_BLOCK = PRE | attention(w=NARROW) | gated()


def qkv_biases(w: int = W) -> dict[str, Shape]:
    """Biases of q, k and v."""
    return biases(attn_q=(H * w,), attn_k=(K * w,), attn_v=(K * w,))


HEAD_NORMS = weights(attn_q_norm=(W,), attn_k_norm=(W,))
WHOLE_NORMS = weights(attn_q_norm=(H * NARROW,), attn_k_norm=(K * NARROW,))
POST = weights(post_attention_norm=(D,), post_ffw_norm=(D,))
LLAMA_BLOCK = PRE | attention() | gated()
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}


def akin(
    architecture: str, keys: Mapping[str, Any], block: Mapping[str, Shape], *, tied: bool = False, w: int = W
) -> Written:
    """A model of llama's dimensions."""
    return Written(
        architecture=architecture,
        keys={**dimensions(), **width(w), **RMS, **BASE, **keys},
        outside=outside(tied=tied),
        block=block,
    )


E, FE = 8, 24  # experts, and how wide they are
ROUTED = {
    "expert_count": E,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": FE,
}
GROUPED = ROUTED | {
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
CORRECTED = biases(exp_probs_b=(E,))


def mixture(ff: int = FE, n: int = E) -> dict[str, Shape]:
    """The router, and the experts in stacks."""
    stacks = weights(ffn_gate_exps=(n, ff, D), ffn_up_exps=(n, ff, D), ffn_down_exps=(n, D, ff))
    return weights(ffn_gate_inp=(n, D)) | stacks


def shared(ff: int = 2 * FE) -> dict[str, Shape]:
    """What every token takes beside its experts."""
    return weights(ffn_gate_shexp=(ff, D), ffn_up_shexp=(ff, D), ffn_down_shexp=(D, ff))


def plain(ff: int = FF) -> dict[str, Shape]:
    """A feed-forward part of two maps."""
    return weights(ffn_up=(ff, D), ffn_down=(D, ff))


GLM = weights(attn_norm=(D,), post_attention_norm=(D,)) | attention() | qkv_biases() | HEAD_NORMS
FUSED = (
    PRE
    | biases(attn_norm=(D,), ffn_norm=(D,), attn_qkv=(3 * D,), attn_output=(D,))
    | weights(attn_qkv=(3 * D, D), attn_output=(D, D))
)
NEOX = FUSED | plain() | biases(ffn_up=(FF,), ffn_down=(D,))
RANK, Q_RANK, NOPE, TURNED, VALUE = 24, 20, 12, 8, 10  # of latent attention
RMS6 = {"attention.layer_norm_rms_epsilon": 1e-6}
LATENT_WIDTHS = {"attention.q_lora_rank": Q_RANK, "attention.kv_lora_rank": RANK, "rope.dimension_count": TURNED}
LATENT_OLD = LATENT_WIDTHS | {
    "attention.head_count_kv": H,
    "attention.key_length": NOPE + TURNED,
    "attention.value_length": VALUE,
}
LATENT_NEW = LATENT_WIDTHS | {
    "attention.key_length": RANK + TURNED,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + TURNED,
    "attention.value_length_mla": VALUE,
}
LATENT = PRE | weights(
    attn_q_a=(Q_RANK, D),
    attn_q_a_norm=(Q_RANK,),
    attn_q_b=(H * (NOPE + TURNED), Q_RANK),
    attn_kv_a_mqa=(RANK + TURNED, D),
    attn_kv_a_norm=(RANK,),
    attn_output=(D, H * VALUE),
)
SPLIT = weights(attn_k_b=(H, RANK, NOPE), attn_v_b=(H, VALUE, RANK))
LITE = {key: value for key, value in LATENT_OLD.items() if "q_lora" not in key} | {"leading_dense_block_count": 1}
LITE_BLOCK = {name: shape for name, shape in LATENT.items() if "attn_q" not in name} | weights(
    attn_q=(H * (NOPE + TURNED), D), attn_kv_b=(H * (NOPE + VALUE), RANK)
)
NEXT = weights(
    **{
        "nextn.eh_proj": (D, 2 * D),
        "nextn.embed_tokens": (N_VOCAB, D),
        "nextn.enorm": (D,),
        "nextn.hnorm": (D,),
        "nextn.shared_head_norm": (D,),
        "nextn.shared_head_head": (N_VOCAB, D),
    }
)


def divisors(n: int, most: float = 9.0) -> np.ndarray:
    """What each of `n` frequencies is divided by, from 1 on."""
    return np.linspace(1.0, most, n, dtype=np.float32)


def longrope(original: int) -> Written:
    """phi3 with divisors of its own for contexts up to `original` and for longer ones; a file's context is one of both.

    llama.cpp takes the long ones where the context that it is opened with is longer, whatever the text's length.
    """
    scaling = {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": 1.19}
    lists = {"rope_factors_short.weight": 4.0, "rope_factors_long.weight": 9.0}
    return replace(
        PHI3,
        keys={**PHI3.keys, **scaling, "context_length": LEAST_CONTEXT},
        least=original + 1 if original < LEAST_CONTEXT else 1,
        values={name: divisors(NARROW // 2, most) for name, most in lists.items()},
    )


PHI3 = Written(
    architecture="phi3",
    keys=dimensions() | RMS | BASE | {"rope.dimension_count": NARROW},
    outside=outside(),
    block=PRE
    | weights(attn_qkv=((H + 2 * K) * NARROW, D), attn_output=(D, H * NARROW), ffn_up=(2 * FF, D), ffn_down=(D, FF)),
)
GEMMA3 = Written(
    architecture="gemma3",
    layers=7,
    keys=dimensions(block_count=7) | width() | RMS | BASE | {"attention.sliding_window": 5},
    outside=outside(tied=True),
    block=LLAMA_BLOCK | POST | HEAD_NORMS,
)
SOFTMAX_LATENT = Written(
    architecture="deepseek2",
    keys=dimensions()
    | RMS6
    | BASE
    | ROUTED
    | LATENT_OLD
    | {"leading_dense_block_count": 1, "expert_weights_scale": 1.7},
    outside=outside(),
    blocks=(
        LATENT | weights(attn_kv_b=(H * (NOPE + VALUE), RANK)) | gated(),
        *(LATENT | weights(attn_kv_b=(H * (NOPE + VALUE), RANK)) | mixture() | shared(),) * 2,
    ),
)
MODELS: dict[str, Written] = {
    "llama": akin("llama", {}, LLAMA_BLOCK),
    "llama, biases": akin("llama", {}, LLAMA_BLOCK | qkv_biases() | biases(attn_output=(D,)), tied=True),
    "llama, linear": akin("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LLAMA_BLOCK),
    "llama, yarn": akin("llama", YARN, LLAMA_BLOCK),
    "qwen2": akin("qwen2", {}, NARROW_BLOCK | qkv_biases(NARROW), w=NARROW),
    "qwen3": akin("qwen3", {}, LLAMA_BLOCK | HEAD_NORMS, tied=True),
    "granite": akin(
        "granite",
        {"embedding_scale": 1.7, "residual_scale": 0.6, "attention.scale": 0.11, "logit_scale": 1.9},
        LLAMA_BLOCK,
        tied=True,
    ),
    "command-r": Written(
        architecture="command-r",
        keys=dimensions() | width(NARROW) | NORM | BASE | {"logit_scale": 0.7},
        outside=outside(tied=True),
        block=weights(attn_norm=(D,)) | attention(w=NARROW) | gated(),
    ),
    "olmo2": akin("olmo2", {}, attention(w=NARROW) | gated() | WHOLE_NORMS | POST, w=NARROW),
    "gemma": akin("gemma", {}, LLAMA_BLOCK, tied=True),
    "gemma2": akin(
        "gemma2",
        {"attention.sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        LLAMA_BLOCK | POST,
        tied=True,
    ),
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "llama, experts": akin("llama", {"expert_count": E, "expert_used_count": 2}, PRE | attention() | mixture(FF)),
    "qwen3moe": akin(
        "qwen3moe",
        {"expert_count": E, "expert_used_count": 2, "expert_feed_forward_length": FE},
        PRE | attention() | HEAD_NORMS | mixture(),
    ),
    "olmoe": akin(
        "olmoe",
        {"expert_count": E, "expert_used_count": 2, "attention.head_count_kv": H},
        PRE | attention(k=H, w=NARROW) | weights(attn_q_norm=(D,), attn_k_norm=(D,)) | mixture(FF),
        w=NARROW,
    ),
    "glm4moe": Written(
        architecture="glm4moe",
        keys=dimensions() | width() | RMS | BASE | GROUPED | {"rope.dimension_count": W // 2},
        outside=outside(),
        blocks=(GLM | gated(), *(GLM | mixture() | CORRECTED | shared(),) * 2),
    ),
    "gpt-oss": akin(
        "gpt-oss",
        {"expert_count": E, "expert_used_count": 2, "expert_feed_forward_length": FE, "attention.sliding_window": 5}
        | YARN,
        weights(attn_norm=(D,), post_attention_norm=(D,))
        | attention()
        | qkv_biases()
        | biases(attn_output=(D,), ffn_gate_inp=(E,))
        | weights(attn_sinks=(H,))
        | mixture()
        | biases(ffn_gate_exps=(E, FE), ffn_up_exps=(E, FE), ffn_down_exps=(E, D)),
    ),
    "llama4": Written(
        architecture="llama4",
        layers=4,
        keys=dimensions(block_count=4)
        | width()
        | RMS
        | BASE
        | {
            "expert_count": 16,
            "expert_used_count": 1,
            "expert_feed_forward_length": FE,
            "interleave_moe_layer_step": 2,
        },
        outside=outside(),
        blocks=(PRE | attention() | gated(), PRE | attention() | mixture(n=16) | shared(FE)) * 2,
    ),
    "deepseek": Written(
        architecture="deepseek",
        keys=dimensions()
        | width(NARROW)
        | RMS
        | BASE
        | ROUTED
        | {"leading_dense_block_count": 1, "expert_weights_scale": 1.0},
        outside=outside(),
        blocks=(NARROW_BLOCK, *(PRE | attention(w=NARROW) | mixture() | shared(),) * 2),
    ),
    "deepseek2, softmax": SOFTMAX_LATENT,
    "deepseek2, sigmoid": Written(
        architecture="deepseek2",
        keys=dimensions(attention__head_count_kv=1)
        | RMS6
        | BASE
        | GROUPED
        | LATENT_NEW
        | YARN
        | {"rope.scaling.yarn_log_multiplier": 0.08},
        outside=outside(),
        blocks=(LATENT | SPLIT | gated(), *(LATENT | SPLIT | mixture() | CORRECTED | shared(),) * 2),
    ),
    "starcoder2": Written(
        architecture="starcoder2",
        keys=dimensions() | width(NARROW) | NORM | BASE,
        outside=outside(norm_bias=True),
        block=PRE
        | biases(attn_norm=(D,), ffn_norm=(D,))
        | attention(w=NARROW)
        | qkv_biases(NARROW)
        | plain()
        | biases(attn_output=(D,), ffn_up=(FF,), ffn_down=(D,)),
    ),
    "gptneox": Written(
        architecture="gptneox",
        keys=dimensions(attention__head_count_kv=H)
        | NORM
        | {"rope.dimension_count": NARROW // 2, "use_parallel_residual": True},
        outside=outside(norm_bias=True),
        block=NEOX,
    ),
    "gptneox, sequential": Written(
        architecture="gptneox",
        keys=dimensions(attention__head_count_kv=H)
        | NORM
        | {"rope.dimension_count": NARROW // 2, "use_parallel_residual": False},
        outside=outside(norm_bias=True),
        block=NEOX,
    ),
    "falcon": Written(
        architecture="falcon",
        keys=dimensions(attention__head_count_kv=1, feed_forward_length=4 * D) | NORM,
        outside=outside(norm_bias=True),
        block=weights(attn_norm=(D,), attn_qkv=((H + 2) * NARROW, D), attn_output=(D, D))
        | biases(attn_norm=(D,))
        | plain(4 * D),
    ),
    "falcon, two norms": Written(
        architecture="falcon",
        keys=dimensions(feed_forward_length=4 * D) | NORM,
        outside=outside(norm_bias=True),
        block=weights(attn_norm=(D,), attn_norm_2=(D,), attn_qkv=((H + 2 * K) * NARROW, D), attn_output=(D, D))
        | biases(attn_norm=(D,), attn_norm_2=(D,))
        | plain(4 * D),
    ),
    "bloom": Written(
        architecture="bloom",
        keys=dimensions(attention__head_count=6, attention__head_count_kv=6, feed_forward_length=4 * D) | NORM,
        outside=outside(norm_bias=True, tied=True, token_embd_norm=(D,)) | biases(token_embd_norm=(D,)),
        block=FUSED | plain(4 * D) | biases(ffn_up=(4 * D,), ffn_down=(D,)),
    ),
    "mpt": Written(
        architecture="mpt",
        keys=dimensions(attention__head_count=6, attention__head_count_kv=6, feed_forward_length=4 * D)
        | NORM
        | {"attention.max_alibi_bias": 8.0},
        outside=outside(tied=True),
        block=PRE | weights(attn_qkv=(3 * D, D), attn_output=(D, D)) | plain(4 * D),
    ),
    "phi2": Written(
        architecture="phi2",
        keys=dimensions(attention__head_count_kv=H) | NORM | {"rope.dimension_count": NARROW // 2},
        outside=outside(norm_bias=True) | biases(output=(N_VOCAB,)),
        block=weights(attn_norm=(D,))
        | biases(attn_norm=(D,))
        | attention(k=H, w=NARROW)
        | biases(attn_q=(D,), attn_k=(D,), attn_v=(D,), attn_output=(D,))
        | plain()
        | biases(ffn_up=(FF,), ffn_down=(D,)),
    ),
    "gpt2": Written(
        architecture="gpt2",
        keys=dimensions(attention__head_count_kv=H) | NORM,
        outside=outside(norm_bias=True, tied=True, position_embd=(CONTEXT, D)),
        block=FUSED | plain() | biases(ffn_up=(FF,), ffn_down=(D,)),
    ),
    "smollm3": Written(
        architecture="smollm3",
        layers=4,
        keys=dimensions(block_count=4) | width() | RMS | BASE,
        outside=outside(tied=True),
        block=LLAMA_BLOCK,
    ),
    "olmo": Written(
        architecture="olmo",
        keys=dimensions() | width(NARROW) | NORM | BASE,
        outside=weights(token_embd=(N_VOCAB, D), output=(N_VOCAB, D)),
        block=attention(w=NARROW) | gated(),
    ),
    "llama, divisors": replace(akin("llama", {}, LLAMA_BLOCK), values={"rope_freqs.weight": divisors(W // 2)}),
    "llama, one map": akin("llama", {}, PRE | weights(attn_qkv=((H + 2 * K) * W, D), attn_output=(D, H * W)) | gated()),
    "gemma3, scaled": replace(
        GEMMA3,
        keys={
            **GEMMA3.keys,
            "rope.freq_base_swa": 90.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "phi3, short": longrope(LEAST_CONTEXT),
    "phi3, long": longrope(8),
    "phi3, three maps": replace(
        PHI3,
        block=PRE | attention(w=NARROW) | weights(ffn_up=(2 * FF, D), ffn_down=(D, FF)),
    ),
    "deepseek2, one expert map": Written(
        architecture="deepseek2",
        keys=dimensions(attention__head_count_kv=1) | RMS6 | BASE | GROUPED | LATENT_NEW,
        outside=outside(),
        blocks=(
            LATENT | SPLIT | gated(),
            *(
                LATENT
                | SPLIT
                | weights(ffn_gate_inp=(E, D), ffn_gate_up_exps=(E, 2 * FE, D), ffn_down_exps=(E, D, FE))
                | CORRECTED
                | shared(),
            )
            * 2,
        ),
    ),
    "phi3, window": replace(PHI3, keys={**PHI3.keys, "attention.sliding_window": 5}),
    "deepseek2, softmax, groups": replace(
        SOFTMAX_LATENT, keys={**SOFTMAX_LATENT.keys, "expert_group_count": 4, "expert_group_used_count": 2}
    ),
    "glm4moe, predictors": Written(
        architecture="glm4moe",
        layers=3,
        keys=dimensions()
        | width()
        | RMS
        | BASE
        | GROUPED
        | {"rope.dimension_count": W // 2, "nextn_predict_layers": 1},
        outside=outside(),
        blocks=(GLM | gated(), GLM | mixture() | CORRECTED | shared(), GLM | mixture() | CORRECTED | shared() | NEXT),
    ),
    "deepseek2, one query map": Written(
        architecture="deepseek2",
        layers=27,  # by which llama.cpp knows the lite model
        keys=dimensions(block_count=27) | RMS6 | BASE | ROUTED | LITE | {"expert_weights_scale": 1.0},
        outside=outside(),
        blocks=(LITE_BLOCK | gated(), *(LITE_BLOCK | mixture() | shared(),) * 26),
    ),
}
ENCODERS = {
    "bert": Written(
        architecture="bert",
        keys=dimensions(attention__head_count_kv=H) | NORM | {"attention.causal": False, "pooling_type": 1},
        outside=weights(token_embd=(N_VOCAB, D), position_embd=(CONTEXT, D), token_types=(2, D), token_embd_norm=(D,))
        | biases(token_embd_norm=(D,)),
        block=attention(k=H, w=NARROW)
        | weights(attn_output_norm=(D,), layer_output_norm=(D,))
        | biases(attn_q=(D,), attn_k=(D,), attn_v=(D,), attn_output=(D,), attn_output_norm=(D,))
        | plain()
        | biases(layer_output_norm=(D,), ffn_up=(FF,), ffn_down=(D,)),
    )
}


def t5(*, tied: bool) -> Written:
    """Encoder and decoder, of T5 1.1 with gates and a head of its own, or tied and without."""
    inside = {"attn_norm": (D,), "attn_q": (H * W, D), "attn_k": (H * W, D), "attn_v": (H * W, D), "attn_o": (D, H * W)}
    ffn = {"ffn_norm": (D,), "ffn_up": (FF, D), "ffn_down": (D, FF)} | ({} if tied else {"ffn_gate": (FF, D)})
    cross = {f"cross_{name}": shape for name, shape in inside.items()}
    held = {f"enc.blk.{i}.{name}": shape for i in range(2) for name, shape in (inside | ffn).items()}
    held |= {f"dec.blk.{i}.{name}": shape for i in range(2) for name, shape in (inside | cross | ffn).items()}
    held |= {f"{side}.{name}": shape for side in ("enc", "dec") for name, shape in T5_OUTSIDE.items()}
    return Written(
        architecture="t5",
        keys=dimensions(block_count=2, attention__head_count_kv=H)
        | RMS
        | NORM
        | {"attention.key_length": W, "attention.value_length": W, "attention.relative_buckets_count": 8}
        | {"decoder_block_count": 2, "decoder_start_token_id": 0},
        outside=weights(token_embd=(N_VOCAB, D), **held) | ({} if tied else weights(output=(N_VOCAB, D))),
    )


T5_OUTSIDE: dict[str, Shape] = {"output_norm": (D,), "blk.0.attn_rel_b": (8, H)}
ENCODER_DECODERS = {"t5, gated": t5(tied=False), "t5, tied": t5(tied=True)}
