"""The granitemoehybrid family: Mamba-2 in most layers, granite's attention in some, with or without experts.

Granite 4 (IBM 2025, its model cards). A feed-forward that every token takes stands beside the experts, or alone where
there are none. Attention has RoPE, or no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import bamba, granite, granitemoe
from asbuilt.families.shared import experts, state_space
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import OnlyWhere, block, every
from asbuilt.families.shared.key import Irrelevant, Only, Size, Values, but, written
from asbuilt.families.shared.names import ATTENTION, NORMS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, HeadWidth, kv_heads, sizes
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Attention, LanguageModel, Mamba2, Mixer, MixtureOfExperts, Model, RMSNorm, Rotary, Router


def build(
    *,
    attends: tuple[bool, ...],
    eps: float,
    rotary: Rotary | None = None,
    bias: bool = False,
    score_scale: float | None = None,
    router: Router | None,
    d_expert: int | None,
    embedding_scale: float,
    branch_scale: float,
    logit_scale: float,
    **values: Any,  # noqa: ANN401  # sizes, and fields of Mamba-2 where a layer has it
) -> LanguageModel:
    """Returns the model of these sizes; `attends` says which layers have attention, with RoPE if there is `rotary`.

    The feed-forward is d_ff wide; with a `router` it stands beside experts `d_expert` wide.
    """
    mixers: dict[bool, Mixer] = {} if all(attends) else {False: bamba.taken(values, eps)}
    made = sized(values, rotary=rotary, n_heads=1)  # n_heads is missing where no layer has attention
    norm = RMSNorm(d=made.d_model, eps=eps)
    if any(attends):
        mixers[True] = made.attention(bias=bias, output_bias=bias, scale=score_scale)
    ffn = made.gated() if router is None else made.mixture(router, d_expert, d_shared=made.d_ff)
    kinds = {attend: block(mixer, ffn, norm, branch_scale) for attend, mixer in mixers.items()}
    blocks = tuple(kinds[attend] for attend in attends)
    return made.model(blocks, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)


class _Layers:
    """`layer_types`, whose names transformers changed; all layers have Mamba-2 where it is missing."""

    key = "layer_types"
    attention = ("attention", "full_attention")
    mamba = ("mamba", "linear_attention")

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = self.mamba[:1] * values["n_layers"]
        types = read_layer_types(reader, usual, (*self.attention, *self.mamba))
        values["attends"] = tuple(one in self.attention for one in types)

    def write(self, parts: Parts) -> dict[str, Any]:
        attends = (isinstance(block.branches[0].body, Attention) for block in parts.model.blocks)
        return {self.key: [(self.attention if one else self.mamba)[0] for one in attends]}


class _Positions:
    """`position_embedding_type`: `rope`, or none, which published files call `nope`."""

    rope = Rope()
    key = "position_embedding_type"
    keys = (key, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["rotary"] = None
        if reader.given(self.key) and reader.choice(self.key, choices={"rope": True, "nope": False}):
            self.rope.read(reader, values)
            return
        for key in self.keys:
            reader.unused(key, "attention has no positions")

    def write(self, parts: Parts) -> dict[str, Any]:
        if parts.attention.positions is not None:
            return self.rope.write(parts) | {self.key: "rope"}
        said = parts.carried.get(self.key, "nope")
        return {self.key: "nope" if said == "rope" else said}


class _Experts:
    """`num_local_experts`, 0 in models without, and the keys of experts."""

    key = "num_local_experts"
    keys = (
        experts.routed(*experts.counts(key, n_experts=8, top_k=2), renormalise=True),
        Size("intermediate_size", "d_expert", default=11008, at="mixture.d_ff"),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        if reader.size(self.key, default=8, least=0):
            for key in self.keys:
                key.read(reader, values)
            return
        values |= {"router": None, "d_expert": None}
        for name in (self.key, "num_experts_per_tok", "intermediate_size"):
            reader.unused(name, "no layer has experts")

    def write(self, parts: Parts) -> dict[str, Any]:
        return written(self.keys, parts) if any(every(parts, MixtureOfExperts)) else {self.key: 0}


def _width(parts: Parts) -> Any:  # noqa: ANN401
    return parts.at("mixture.shared.d_ff" if any(every(parts, MixtureOfExperts)) else "ffn.d_ff")


EMBEDDING_SCALE, SCORE_SCALE, BRANCH_SCALE, LOGIT_SCALE = granite.FACTORS
NAMES = Names(
    stems={
        **NORMS,
        "mixer.norm": NORMS["attention.norm"],
        **ATTENTION,
        **state_space.stems("mixer", "mamba"),
        "ffn.body.router": "block_sparse_moe.router.layer",
    },
    stacked=granitemoe.stacked,
)


def names(spec: Model, family: str) -> TensorTable:
    """Returns the table; the feed-forward has the names of the one beside the experts where it stands alone too."""
    sparse = any(isinstance(part, MixtureOfExperts) for part in (block.branches[-1].body for block in spec.blocks))
    at = "ffn.body.shared" if sparse else "ffn.body"
    fused = {"shared_mlp.input_linear": Fused(stems=(f"{at}.gate", f"{at}.up"))}
    stems = {**NAMES.stems, f"{at}.down": "shared_mlp.output_linear"}
    return replace(NAMES, fused=fused, stems=stems)(spec, family)


FAMILY = Family(
    name="granitemoehybrid",
    heads=("GraniteMoeHybridForCausalLM",),
    keys=(  # defaults as in transformers' GraniteMoeHybridConfig
        *but(
            sizes(n_vocab=32000, d_model=4096, d_ff=1024, n_layers=32, n_heads=32, context=2048),
            **dict.fromkeys(("n_heads", "d_head", "n_kv_heads", "rotary")),
            d_ff=Size("shared_intermediate_size", "d_ff", default=1024, at=_width),
            activation=lambda _: state_space.silu("hidden_act"),
        ),
        RMS_EPS,
        _Layers(),
        OnlyWhere(
            Attention,
            lambda values: any(values["attends"]),
            Size("num_attention_heads", "n_heads", default=32),
            HeadWidth(),
            kv_heads(None),
            _Positions(),
            ATTENTION_BIAS,
            SCORE_SCALE,
        ),
        OnlyWhere(Mamba2, bamba.MAMBA.used, *bamba.MAMBA.keys),
        _Experts(),
        experts.TRAINING,
        EMBEDDING_SCALE,
        BRANCH_SCALE,
        LOGIT_SCALE,
        state_space.COMPUTED,
        Only("normalization_function", "rmsnorm", None, reason="norms of this family are RMSNorm"),
        Irrelevant("only of the initial weights", "init_method"),
        Irrelevant("how it is computed, not what", "mamba_chunk_size"),
    ),
    build=build,
    names=names,
)
