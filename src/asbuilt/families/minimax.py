"""The minimax family: lightning attention in most layers, attention in the others, experts in all.

MiniMax 2025 (MiniMax-01, arXiv 2501.08313). A branch's output is added to the normalised stream, each with a factor.
Published models have RoPE on half of each head, as `rotary_dim` says; transformers 5.24 does not read it, and applies
RoPE to whole heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from asbuilt.families import mixtral
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Key, Number, Only, Values, but, eps
from asbuilt.families.shared.names import NO_BUFFERS, NORMS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import RopeOfWidth
from asbuilt.families.shared.sizes import FULL, NullableHeadWidth, sizes, window
from asbuilt.families.shared.table import Interleave, Layout
from asbuilt.spec import Attention, Block, Branch, LanguageModel, LightningAttention, RMSNorm, Router

LINEAR = "linear_attention"
Factors = tuple[float, float]  # of the stream and of a branch's output


def build(
    *,
    linear: Sequence[bool],
    router: Router,
    eps: float,
    window: int | None,
    linear_alpha: float = 1.0,
    linear_beta: float = 1.0,
    full_alpha: float = 1.0,
    full_beta: float = 1.0,
    mlp_alpha: float = 1.0,
    mlp_beta: float = 1.0,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, with lightning attention in the `linear` layers.

    Alphas multiply the normalised stream that a branch is added to, betas the branch's output. Heads of later layers
    forget more slowly.
    """
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    ffn = Branch(name="ffn", norm=norm, body=made.mixture(router), normed=True, stream_scale=mlp_alpha, scale=mlp_beta)
    attention = Branch(
        name="attention",
        norm=norm,
        body=made.attention(window=window),
        normed=True,
        stream_scale=full_alpha,
        scale=full_beta,
    )

    def lightning(layer: int) -> Branch:
        body = LightningAttention(
            d_model=made.d_model,
            n_heads=made.n_heads,
            d_head=made.head_width,
            decay=1 - layer / (made.n_layers - 1 + 1e-5) + 1e-5,
            norm=RMSNorm(d=made.n_heads * made.head_width),
            activation=made.activation,
        )
        return Branch(name="mixer", norm=norm, body=body, normed=True, stream_scale=linear_alpha, scale=linear_beta)

    firsts = (lightning(i) if one else attention for i, one in enumerate(linear))
    return made.model(tuple(Block(branches=(first, ffn)) for first in firsts), norm)


class _Kinds:
    """Which layers have lightning attention: `layer_types`, or else every second one."""

    key, into = "layer_types", "linear"

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = tuple(LINEAR if i % 2 else FULL for i in range(values["n_layers"]))
        values[self.into] = tuple(one == LINEAR for one in read_layer_types(reader, usual, (FULL, LINEAR)))

    def write(self, parts: Parts) -> dict[str, Any]:
        bodies = (block.branches[0].body for block in parts.model.blocks)
        return {self.key: [LINEAR if isinstance(body, LightningAttention) else FULL for body in bodies]}


def _factors(kind: str, into: str, has: type[Attention] | type[LightningAttention] | None) -> tuple[Key, ...]:
    """Returns the keys of the factors of branches of a kind, carried where no layer is of that kind."""

    def found(field: str, key: str) -> Any:  # noqa: ANN401
        def at(parts: Parts) -> float:
            branches = (block.branches[-1 if has is None else 0] for block in parts.model.blocks)
            own = (branch for branch in branches if has is None or isinstance(branch.body, has))
            return next((getattr(branch, field) for branch in own), parts.carried.get(key, 1.0))

        return at

    fields = {"alpha": "stream_scale", "beta": "scale"}
    names = {f"{kind}_{end}_factor": (f"{into}_{end}", field) for end, field in fields.items()}
    return tuple(
        Number(key, own, default=1.0, at=found(field, key), carried="of the layers of this kind, where there are any")
        for key, (own, field) in names.items()
    )


def by_head(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of a head's queries, keys and values, then the next head's."""
    part = next(branch.body for branch in block.branches if isinstance(branch.body, LightningAttention))
    return Interleave(part.n_heads, (part.d_head,) * 3)


STEMS = mixtral.STEMS | {
    "mixer.norm": NORMS["attention.norm"],
    "mixer.body.gate": "self_attn.output_gate",
    "mixer.body.norm": "self_attn.norm",
    "mixer.body.o": "self_attn.out_proj",
}
COMPUTED = {r"(.*\.)?self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)": "decays, computed from the config"}

FAMILY = Family(
    name="minimax",
    heads=("MiniMaxForCausalLM",),
    keys=(  # defaults as in transformers' MiniMaxConfig
        *but(
            sizes(n_vocab=32000, d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, context=131072),
            d_head=NullableHeadWidth(),
            rotary=RopeOfWidth(theta=1e6),
        ),
        experts.TRAINING,
        experts.routed(*experts.counts("num_local_experts", "num_experts", n_experts=8, top_k=2), renormalise=True),
        eps("rms_norm_eps", 1e-5),
        window(None),
        _Kinds(),
        *_factors("linear_attn", "linear", LightningAttention),
        *_factors("full_attn", "full", Attention),
        *_factors("mlp", "mlp", None),
        Only("attention_bias", False, None, reason="this family has no biases"),
        Only("postnorm", True, None, reason="branches of this family are added to the normalised stream"),
        Only("shared_intermediate_size", 0, None, reason="this family has no shared expert"),
        Irrelevant("there is no shared expert", "shared_moe_mode"),
        Irrelevant("how it is computed, not what", "block_size"),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        experts=mixtral.EXPERTS,
        fused={"self_attn.qkv_proj": Fused.qkv(join=by_head, at="mixer.body")},
        ignored=NO_BUFFERS | COMPUTED,
    ),
)
