"""The gpt_oss family: sinks, windows on every second layer, and experts with biases and a clamped gate.

OpenAI 2025 (arXiv 2508.10925). The published weights of the experts are packed as mxfp4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Number, Only, but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.rotary import ScaledRope, usual_scaling
from asbuilt.families.shared.sizes import HeadWidth, LayerWindows, sizes
from asbuilt.families.shared.table import Chain, EachExpert, Entry, Interleave, Layout, Mxfp4, Transpose, entry
from asbuilt.spec import ClampedGate, MixtureOfExperts, Model, RMSNorm, Router

# what a config without RoPE keys means
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GATE = ClampedGate(alpha=1.702, limit=7.0)
STEMS = NORMS | ATTENTION | {"ffn.body.router": "mlp.router", "attention.body.sinks": "self_attn.sinks"}


def build(
    router: Router,
    *,
    windows: tuple[int | None, ...],
    alpha: float = GATE.alpha,
    limit: float = GATE.limit,
    eps: float = 1e-5,
    bias: bool = True,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes, each layer with its own of the windows."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    ffn = replace(made.mixture(router), gating=ClampedGate(alpha=alpha, limit=limit), bias=True)
    kinds = {
        window: pre_norm(made.attention(window=window, bias=bias, output_bias=bias, sinks=True), ffn, norm)
        for window in set(windows)
    }
    return made.model(tuple(map(kinds.__getitem__, windows)), norm)


def _interleaved(part: MixtureOfExperts) -> Layout:
    """Returns the layout of gate and up, whose rows alternate."""
    return Interleave(part.d_ff, (1, 1))


def _biases(part: MixtureOfExperts) -> list[Entry]:
    layout = EachExpert(_interleaved(part))
    inward = Entry(paths=("gate_bias", "up_bias"), names=("mlp.experts.gate_up_proj_bias",), layout=layout)
    return [inward, entry("down_bias", "mlp.experts.down_proj_bias")]


def _plain(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of experts stored as plain numbers, inputs first."""
    inward = EachExpert(Chain((_interleaved(part), Transpose())))
    return [
        Entry(paths=("gate", "up"), names=("mlp.experts.gate_up_proj",), layout=inward),
        entry("down", "mlp.experts.down_proj", EachExpert(Transpose())),
        *_biases(part),
    ]


def _packed(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of experts stored as mxfp4, outputs first."""
    layouts = {("gate", "up"): Chain((EachExpert(_interleaved(part)), Mxfp4())), ("down",): Mxfp4()}
    names = {paths: f"mlp.experts.{'_'.join(paths)}_proj" for paths in layouts}
    return [
        Entry(paths=paths, names=(f"{name}_blocks", f"{name}_scales"), layout=layouts[paths], packed=True)
        for paths, name in names.items()
    ] + _biases(part)


FAMILY = Family(
    name="gpt_oss",
    heads=("GptOssForCausalLM",),
    prepare=usual_scaling(ROPE),
    keys=(  # defaults as in transformers' GptOssConfig
        Only("hidden_act", "silu", reason="the experts of this family are gated by a clamped silu"),
        *but(
            sizes(n_vocab=201088, d_model=2880, d_ff=2880, n_layers=36, n_heads=64, n_kv_heads=8, context=131072),
            d_head=HeadWidth(64),
            rotary=ScaledRope(theta=150000.0),
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_local_experts", "num_experts", n_experts=128, top_k=4), renormalise=True, bias=True
        ),
        Only(
            "experts_per_token",
            lambda values: values["router"].top_k,
            reason="another spelling of num_experts_per_tok, which is read",
        ),
        LayerWindows(
            default=128, usual=lambda _, values: [i % 2 == 0 for i in range(values["n_layers"])], required=True
        ),
        Number("swiglu_alpha", "alpha", default=GATE.alpha, at="mixture.gating.alpha"),
        Number("swiglu_limit", "limit", default=GATE.limit, at="mixture.gating.limit"),
        eps("rms_norm_eps", 1e-5),
        Flag("attention_bias", "bias", default=True),
        Irrelevant("the RoPE parameters say it", "initial_context_length"),
    ),
    build=build,
    names=Names(stems=STEMS, stacked=_plain),
    packed={"mxfp4": Names(stems=STEMS, stacked=_packed)},
)
