"""What Qwen's families with gated delta nets share: which layers have one, its sizes, gated attention, tensor names.

Qwen Team 2025 (Qwen3-Next, its blog post). Every fourth layer is attention, unless the config lists the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from asbuilt.families.shared import predictors
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import Sizes, sized, with_predictors
from asbuilt.families.shared.key import Irrelevant, Only, Size, Values
from asbuilt.families.shared.names import EXPERTS, QK_NORMS, ROUTER, SHARED_EXPERT, STEMS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, Kinds, Rope, read_rotary
from asbuilt.families.shared.sizes import FULL, every_but_last
from asbuilt.families.shared.table import Interleave, Layout, TensorTable
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedDeltaNet,
    LanguageModel,
    Model,
    RMSNorm,
    Router,
    ShortConvolution,
)

LINEAR = "linear_attention"
ACTIVATION = Only("hidden_act", "silu", reason="the convolution and the gates are of SiLU")


def build(
    *,
    linear: Sequence[bool],
    n_key_heads: int,
    n_value_heads: int,
    d_key: int,
    d_value: int,
    kernel: int,
    eps: float = 1e-6,
    bias: bool = False,
    router: Router | None = None,
    d_expert: int | None = None,
    d_shared: int | None = None,
    dense: Collection[int] = (),
    n_predictors: int = 0,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes: a gated delta net in the `linear` layers, gated attention in the others.

    With a `router` the feed-forward is a mixture of experts beside a gated shared one, in all but the `dense` layers. A
    prediction layer is a layer of attention, whose feed-forward is as the first layer's.
    """
    made = sized(sizes)
    norm, per_head = (RMSNorm(d=d, eps=eps, gain="offset") for d in (made.d_model, made.head_width))
    channels = 2 * n_key_heads * d_key + n_value_heads * d_value
    delta = GatedDeltaNet(
        d_model=made.d_model,
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        d_key=d_key,
        d_value=d_value,
        conv=ShortConvolution(channels=channels, kernel=kernel),
        norm=RMSNorm(d=d_value, eps=eps),
    )
    attention = made.attention(bias=bias, output_bias=bias, q_norm=per_head, k_norm=per_head, gating="channel")
    ffn = made.gated()
    sparse = ffn if router is None else made.mixture(router, d_expert, None, d_shared, shared_gate=True)

    first = {
        True: Branch(name="delta_net", norm=norm, body=delta),
        False: Branch(name="attention", norm=norm, body=attention),
    }
    second = {kind: Branch(name="ffn", norm=norm, body=body) for kind, body in ((True, ffn), (False, sparse))}
    kinds = [(one, i in dense) for i, one in enumerate(linear)]
    blocks = {kind: Block(branches=(first[kind[0]], second[kind[1]])) for kind in set(kinds)}
    spec = made.model(tuple(blocks[kind] for kind in kinds), norm)
    if not n_predictors:
        return spec
    block = Block(branches=(first[False], second[0 in dense]))
    return with_predictors(spec, block, norm, n_predictors, shared=True)


class LayerKinds:
    """Which layers have a gated delta net: `layer_types`, or all but each interval's last."""

    key, older, into = "layer_types", "full_attention_interval", "linear"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers."""
        interval = reader.size(self.older, default=4)
        reader.overruled(self.older, self.key)
        reader.irrelevant(self.older, f"{self.key}, as it is written, says it")
        usual = tuple(LINEAR if one else FULL for one in every_but_last(values["n_layers"], interval))
        values[self.into] = tuple(kind == LINEAR for kind in read_layer_types(reader, usual, (FULL, LINEAR)))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        mixers = (block.branches[0].body for block in parts.model.blocks)
        return {self.key: [LINEAR if isinstance(one, GatedDeltaNet) else FULL for one in mixers]}


def delta_net(parts: Parts) -> GatedDeltaNet | None:
    """Returns the first gated delta net, None where there is none."""
    bodies = (block.branches[0].body for block in parts.model.blocks)
    return next((body for body in bodies if isinstance(body, GatedDeltaNet)), None)


def of_delta_net(key: str, into: str, default: int, found: Callable[[GatedDeltaNet], int], **more: Any) -> Size:  # noqa: ANN401
    """Returns a key of a gated delta net's sizes, its default where a model has none."""

    def at(parts: Parts) -> int:
        net = delta_net(parts)
        return default if net is None else found(net)

    return Size(key, into, default=default, at=at, **more)


SIZES = (  # defaults as in transformers' Qwen3NextConfig and Qwen3_5TextConfig
    of_delta_net("linear_num_key_heads", "n_key_heads", 16, lambda net: net.n_key_heads),
    of_delta_net(
        "linear_num_value_heads",
        "n_value_heads",
        32,
        lambda net: net.n_value_heads,
        must=(
            lambda values: values["n_value_heads"] % values["n_key_heads"] == 0,
            lambda values: f"a multiple of linear_num_key_heads = {values['n_key_heads']}",
        ),
    ),
    of_delta_net("linear_key_head_dim", "d_key", 128, lambda net: net.d_key),
    of_delta_net("linear_value_head_dim", "d_value", 128, lambda net: net.d_value),
    of_delta_net("linear_conv_kernel_dim", "kernel", 4, lambda net: net.conv.kernel),
)
REDUNDANT = (
    ACTIVATION,
    Only("attn_output_gate", True, reason="attention of this family has gates"),
    Only("output_gate_type", "swish", None, reason="the delta net's gate is a SiLU"),
    Only("use_sliding_window", False, None, reason="this family has no windows"),
    Irrelevant("states are float32 whatever the weights are", "mamba_ssm_dtype"),
)


def _of_texts(inner: ConfigReader, *sizes: int) -> None:
    """Reads the RoPE object of a text, in which all three positions of a token are the same."""
    for key in ("mrope_section", "mrope_interleaved"):
        inner.irrelevant(key, "which positions of an image a pair takes: in a text they are the same")
    KINDS["default"](inner, *sizes)


TEXT_KINDS: Kinds = {**KINDS, "default": _of_texts}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RopeOfTexts(Rope):
    """The keys of RoPE on part of each head, in a text whose images would have three positions."""

    def read(self, reader: ConfigReader, values: dict[str, Any]) -> None:
        """Reads the keys."""
        values["rotary"] = read_rotary(
            reader,
            self.width(values),
            values["max_positions"],
            default_theta=self.theta,
            partial=self.partial,
            kinds=TEXT_KINDS,
            outside=self.outside,
        )


def _net(block: Block) -> GatedDeltaNet:
    return next(branch.body for branch in block.branches if isinstance(branch.body, GatedDeltaNet))


def by_key_head(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of tensors stored by key head, its rows of each and then the next one's."""
    groups = _net(block).n_key_heads
    return Interleave(groups, tuple(n // groups for n in rows))


def by_head(block: Block, rows: tuple[int, ...]) -> Layout:
    """Returns the layout of queries and gates stored by head of attention."""
    attention = next(branch.body for branch in block.branches if isinstance(branch.body, Attention))
    return Interleave(attention.n_heads, tuple(n // attention.n_heads for n in rows))


QUERIES = {"self_attn.q_proj": Fused(stems=("attention.body.q", "attention.body.gate"), join=by_head)}


def inward(*names: str) -> tuple[str, ...]:
    """Returns the stems of a gated delta net's maps."""
    return tuple(f"delta_net.body.{name}" for name in names)


def names(own: dict[str, str], fused: dict[str, Fused]) -> Callable[[Model, str], TensorTable]:
    """Returns what names such a family's tensors; `own` and `fused` are the names of the maps into delta nets."""
    net = {
        "delta_net.norm": "input_layernorm",
        "delta_net.body.conv": "linear_attn.conv1d",
        "delta_net.body.norm": "linear_attn.norm",
        "delta_net.body.o": "linear_attn.out_proj",
        "delta_net.body.A_log": "linear_attn.A_log",
        "delta_net.body.dt_bias": "linear_attn.dt_bias",
        "ffn.body.shared_gate": "mlp.shared_expert_gate",
    }
    stems = STEMS | QK_NORMS | ROUTER | SHARED_EXPERT | net | own
    return predictors.beside(Names(stems=stems, fused=QUERIES | fused, experts=EXPERTS))
