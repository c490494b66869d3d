"""The jamba family: Mamba in most layers, attention without positions in some, experts in every other.

Lieber et al. 2024 (arXiv 2403.19887). What steps are computed from, b and c are normed.
"""

from __future__ import annotations

from typing import Unpack

from asbuilt.families import mamba
from asbuilt.families.shared import experts, state_space
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import Periodic, Where, block, first
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, but
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.sizes import RMS_EPS, DerivedHeadWidth, sizes
from asbuilt.spec import Attention, Block, GatedMLP, LanguageModel, Mamba, MixtureOfExperts, RMSNorm, Router


def build(
    *,
    attends: tuple[bool, ...],
    sparse: tuple[bool, ...],
    router: Router,
    eps: float,
    d_state: int,
    dt_rank: int,
    kernel: int,
    conv_bias: bool,
    ssm_bias: bool,
    expand: int,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes; `attends` and `sparse` say which layers have attention, and experts."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    mixer = mamba.mixer(
        d_model=made.d_model,
        d_inner=expand * made.d_model,
        d_state=d_state,
        dt_rank=dt_rank,
        kernel=kernel,
        conv_bias=conv_bias,
        bias=ssm_bias,
        norm_eps=eps,
        gain="weight",
    )
    attention, ffn = made.attention(rope=False), made.gated()
    mixture = made.mixture(router) if router.n_experts > 1 else ffn
    blocks = (
        block(attention if attend else mixer, mixture if experts else ffn, norm)
        for attend, experts in zip(attends, sparse, strict=True)
    )
    return made.model(tuple(blocks), norm)


def _attends(block: Block) -> bool:
    return isinstance(block.branches[0].body, Attention)


def _sparse(block: Block) -> bool:
    return isinstance(block.branches[-1].body, MixtureOfExperts)


def _expand(parts: Parts) -> int:
    return first(Mamba, "d_inner")(parts) // parts.d_model


STEMS = {
    **dict.fromkeys(("mixer.norm", "attention.norm"), "input_layernorm"),
    "ffn.norm": "pre_ff_layernorm",
    **state_space.stems("mixer", "mamba", state_space.OF_MAMBA),
    **{f"mixer.body.{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    **{f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn.body.router": "feed_forward.router",
}

FAMILY = Family(
    name="jamba",
    heads=("JambaForCausalLM",),
    keys=(  # defaults as in transformers' JambaConfig
        *but(
            sizes(n_vocab=65536, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=262144),
            rotary=None,
            max_positions={"also": ("n_ctx",)},
            d_head=DerivedHeadWidth(),
            d_ff={"at": first((GatedMLP, MixtureOfExperts), "d_ff")},
            activation=lambda _: state_space.silu("hidden_act"),
        ),
        RMS_EPS,
        Periodic(("attn_layer_period", 8), ("attn_layer_offset", 4), "attends", _attends),
        Periodic(("expert_layer_period", 2), ("expert_layer_offset", 1), "sparse", _sparse),
        experts.TRAINING,
        Where(
            MixtureOfExperts,
            lambda values: any(values["sparse"]),
            experts.routed(*experts.counts("num_experts", "num_local_experts", n_experts=16, top_k=2)),
        ),
        Where(
            Mamba,
            lambda values: not all(values["attends"]),
            Size("mamba_d_state", "d_state", default=16, at=first(Mamba, "d_state")),
            Size("mamba_d_conv", "kernel", default=4, at=first(Mamba, "conv.kernel")),
            Size("mamba_expand", "expand", default=2, at=_expand),
            mamba.StepRank("mamba_dt_rank"),
            Flag("mamba_conv_bias", "conv_bias", default=True, at=first(Mamba, "conv.bias")),
            Flag("mamba_proj_bias", "ssm_bias", default=False, at=first(Mamba, "bias")),
        ),
        state_space.COMPUTED,
        Irrelevant("how it is computed, not what", "calc_logits_for_entire_prompt"),
        Only("mamba_inner_layernorms", True, reason="steps, b and c are normed in this family"),
        Irrelevant("the periods say it", "layers_block_type", "layers_num_experts"),
        Only("sliding_window", None, reason="attention of this family has no windows"),
    ),
    build=build,
    padding=0,
    names=Names(
        stems=STEMS,
        outside={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
        experts={part: f"feed_forward.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")},
    ),
)
