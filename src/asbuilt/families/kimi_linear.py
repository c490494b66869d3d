"""The kimi_linear family: three layers of Kimi Delta Attention to one of latent attention without positions.

Kimi Team 2025 (arXiv 2510.26692). Experts are chosen as in DeepSeek-V3; the norms of latents have an epsilon of their
own. Names on disk as on the hub: a convolution for each of q, k and v, which are built as one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from asbuilt.families import mixtral
from asbuilt.families.shared import experts, latent
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.delta_nets import LINEAR
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import DROPPED, Irrelevant, Key, Only, Size, Values, but, eps
from asbuilt.families.shared.names import GATED, NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import ATTENTION_BIAS, FULL, sizes
from asbuilt.families.shared.table import Entry, Framed, Pieces, TensorTable
from asbuilt.spec import (
    Block,
    Branch,
    GatedDeltaNet,
    GatedMLP,
    LanguageModel,
    LatentAttention,
    Model,
    RMSNorm,
    Router,
    ShortConvolution,
)


def build(
    *,
    linear: Sequence[bool],
    n_net_heads: int,
    d_net: int,
    kernel: int,
    kv_rank: int,
    d_nope: int,
    d_rope: int,
    d_value: int,
    router: Router,
    d_expert: int,
    n_shared: int,
    q_rank: int = 0,
    dense: Collection[int] = (),
    bias: bool = False,
    eps: float = 1e-5,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, with a delta net in the `linear` layers, and no experts in the `dense` ones."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    attention = LatentAttention(
        d_model=made.d_model,
        n_heads=made.n_heads,
        q_rank=q_rank or None,
        kv_rank=kv_rank,
        d_nope=d_nope,
        d_rope=d_rope,
        d_value=d_value,
        q_norm=RMSNorm(d=q_rank, eps=latent.INNER_EPS) if q_rank else None,
        kv_norm=RMSNorm(d=kv_rank, eps=latent.INNER_EPS),
        bias=bias,
        output_bias=bias,
    )
    first = {
        True: Branch(name="delta_net", norm=norm, body=_net(made.d_model, n_net_heads, d_net, kernel, eps)),
        False: Branch(name="attention", norm=norm, body=attention),
    }
    second = {True: made.gated(), False: made.mixture(router, d_expert, n_shared)}
    kinds = [(one, i in dense) for i, one in enumerate(linear)]
    blocks = {
        kind: Block(branches=(first[kind[0]], Branch(name="ffn", norm=norm, body=second[kind[1]])))
        for kind in set(kinds)
    }
    return made.model(tuple(blocks[kind] for kind in kinds), norm)


def _net(d_model: int, n_heads: int, width: int, kernel: int, eps: float) -> GatedDeltaNet:
    """Returns the delta net: decays per channel, which like the gate pass through the width of a head."""
    return GatedDeltaNet(
        d_model=d_model,
        n_key_heads=n_heads,
        n_value_heads=n_heads,
        d_key=width,
        d_value=width,
        conv=ShortConvolution(channels=3 * n_heads * width, kernel=kernel),
        norm=RMSNorm(d=width, eps=eps),
        decays="channel",
        decay_rank=width,
        gate_rank=width,
        gating="sigmoid",
    )


class _Nets:
    """Which layers are delta nets, and their sizes: `linear_attn_config`, or the newer keys beside it.

    Layers are counted from 1 there. Without either every fourth layer after the first is attention.
    """

    older = "linear_attn_config"
    sizes = (
        ("n_net_heads", "num_heads", "linear_num_heads", 32),
        ("d_net", "head_dim", "linear_head_dim", 128),
        ("kernel", "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both."""
        inner = reader.nested(self.older)
        reader.known.add(self.older)
        for into, key, newer, usual in self.sizes:
            outside = reader.size(newer, default=usual)
            values[into] = outside if inner is None else inner.size(key, default=outside)
        n_layers = values["n_layers"]
        usual_kinds = tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(n_layers))
        if inner is not None:
            usual_kinds = self._listed(inner, n_layers) or usual_kinds
            inner.finish()
        values["linear"] = tuple(kind == LINEAR for kind in read_layer_types(reader, usual_kinds, (FULL, LINEAR)))

    @staticmethod
    def _listed(inner: ConfigReader, n_layers: int) -> tuple[str, ...]:
        keys = ("full_attn_layers", "kda_layers")
        inner.known.update(keys)
        if not all(inner.given(key) for key in keys):
            return ()
        full, nets = (inner.config[key] for key in keys)
        ok = isinstance(full, list) and isinstance(nets, list) and all(map(is_whole, (*full, *nets)))
        every = ok and sorted((*full, *nets)) == list(range(1, n_layers + 1))
        inner.require(keys[0], every, f"with kda_layers a list of each of the layers 1 to {n_layers} once")
        return tuple(FULL if i + 1 in full else LINEAR for i in range(n_layers))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the older object, which published files have."""
        net = _body(parts, GatedDeltaNet)
        nets = [i for i, b in enumerate(parts.model.blocks, 1) if isinstance(b.branches[0].body, GatedDeltaNet)]
        found = {"num_heads": net.n_key_heads, "head_dim": net.d_key, "short_conv_kernel_size": net.conv.kernel}
        found |= {"kda_layers": nets, "full_attn_layers": [i + 1 for i in range(parts.n_layers) if i + 1 not in nets]}
        newer = ("layer_types", *(key for _, _, key, _ in self.sizes))
        return {self.older: found} | dict.fromkeys(newer, DROPPED)


class _DenseLayers:
    """Which layers have no experts: `mlp_layer_types`, or the first `first_k_dense_replace`."""

    older, newer = "first_k_dense_replace", "mlp_layer_types"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers; raises InputError where none has experts."""
        n_layers, first = values["n_layers"], reader.size(self.older, default=1, least=0)
        reader.overruled(self.older, self.newer)
        kinds = ["dense" if i < first else "sparse" for i in range(n_layers)]
        if reader.given(self.newer):
            kinds = reader.config[self.newer]
        reader.known.add(self.newer)
        ok = isinstance(kinds, list) and len(kinds) == n_layers and all(kind in ("dense", "sparse") for kind in kinds)
        key = self.newer if reader.given(self.newer) else self.older
        reader.require(key, ok and "sparse" in kinds, f"such that some of the {n_layers} layers have experts")
        values["dense"] = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number of the first dense layers, and the list where others are dense too."""
        dense = [isinstance(block.branches[-1].body, GatedMLP) for block in parts.model.blocks]
        first = dense.index(False) if False in dense else len(dense)
        kinds = ["dense" if one else "sparse" for one in dense]
        return {self.older: first, self.newer: kinds if any(dense[first:]) else DROPPED}


def _body(parts: Parts, kind: type[Any]) -> Any:  # noqa: ANN401
    """Returns the first mixer of a kind; raises InputError where there is none."""
    bodies = (block.branches[0].body for block in parts.model.blocks)
    found = next((body for body in bodies if isinstance(body, kind)), None)
    return parts.expect(found, kind, "blocks")


def _of_attention(key: Size) -> Size:
    """Returns a key of latent attention, which is found in the first layer that has it."""
    name = str(key.at).removeprefix("mixer.")
    return replace(key, at=lambda parts: getattr(_body(parts, LatentAttention), name))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _Groups(experts.Groups):
    """Groups of experts, whose number has a name of its own."""

    keys = ("num_expert_group", "topk_group")


def _router() -> Key:
    count, top_k = experts.counts("num_experts", "num_local_experts", n_experts=256, top_k=8)
    assert isinstance(top_k, Size)
    renormalise = replace(experts.renormalise(True), key="moe_renormalize", also=("norm_topk_prob",))
    more = replace(top_k, key="num_experts_per_token", also=("num_experts_per_tok",))
    groups = _Groups(n_group=1, topk_group=1, score="two_best")
    fixed = {"scoring": "sigmoid", "correction": True, "eps": experts.EPS}
    return experts.routed(count, more, groups, renormalise, experts.routed_scale(2.446), **fixed)


def _keys() -> tuple[Key, ...]:
    """Returns the keys; defaults as in transformers' KimiLinearConfig."""
    width, shared, _ = experts.fine_grained(d_expert=1024, n_shared=1, n_dense=1)
    assert isinstance(shared, Size)
    widths = [_of_attention(key) for key in latent.WIDTHS]
    usual = sizes(n_vocab=163840, d_model=2304, d_ff=9216, n_layers=27, n_heads=32, n_kv_heads=32, context=1048576)
    heads = {"at": lambda parts: _body(parts, LatentAttention).n_heads}
    return (
        *(replace(key, default=0) if key.into == "q_rank" else key for key in widths),
        *but(
            usual,
            max_positions={"key": "model_max_length", "also": ("max_position_embeddings",)},
            n_heads=heads,
            n_kv_heads={**heads, "divides": "", "must": latent.AS_MANY},
            d_head=None,
            rotary=None,
            d_ff=experts.dense,
        ),
        replace(ATTENTION_BIAS, at=lambda parts: _body(parts, LatentAttention).output_bias),
        eps("rms_norm_eps", 1e-5),
        _Nets(),
        _router(),
        width,
        replace(shared, key="num_shared_experts", also=("n_shared_experts",)),
        _DenseLayers(),
        experts.TRAINING,
        Only("mla_use_nope", True, reason="latent attention of this family has no positions"),
        Only("moe_layer_freq", 1, reason="every layer after the dense ones has experts"),
        Only("moe_router_activation_func", "sigmoid", reason="this family scores by sigmoid"),
        Only("use_grouped_topk", True, reason="experts are chosen within groups"),
        Only("num_nextn_predict_layers", 0, None, reason="published files have no prediction layers"),
        Irrelevant("attention has no positions", "rope_theta", "rope_scaling", "rope_parameters"),
        Irrelevant("follows from the widths that are read", "head_dim", "qk_head_dim"),
    )


STEMS = NORMS | GATED | {path: name for path, name in latent.STEMS.items() if path.startswith("attention.body.")}
NET = {
    **{part: f"{part}_proj" for part in "qkvo"},
    "beta": "b_proj",
    "decay_down": "f_a_proj",
    "decay": "f_b_proj",
    "gate_down": "g_a_proj",
    "gate": "g_b_proj",
    "norm": "o_norm",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}
STEMS |= {f"delta_net.body.{part}": f"self_attn.{name}" for part, name in NET.items()}
STEMS |= {"delta_net.norm": "input_layernorm", "ffn.body.router": "block_sparse_moe.gate"}
STEMS |= {"ffn.body.router.correction": "block_sparse_moe.gate.e_score_correction_bias"}
STEMS |= {f"ffn.body.shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}


def table(spec: Model, family: str) -> TensorTable:
    """Returns the names; the convolutions of q, k and v are stored one by one."""
    made = NAMES(spec, family)
    return replace(made, entries=tuple(_apart(one) for one in made.entries))


def _apart(one: Entry) -> Entry:
    if not one.names[0].endswith(CONVOLUTION):
        return one
    names = tuple(one.names[0].replace(CONVOLUTION, f"self_attn.{part}_conv1d.weight") for part in "qkv")
    return replace(one, names=names, layout=Pieces(3))


CONVOLUTION = "self_attn.conv1d.weight"
NAMES = Names(
    stems=STEMS | {"delta_net.body.conv": "self_attn.conv1d"},
    fused=latent.PLAIN_NAMES.fused,
    experts=mixtral.EXPERTS,
    layouts={"delta_net.body.A_log": Framed(before=2, after=1)},
)
FAMILY = Family(name="kimi_linear", heads=("KimiLinearForCausalLM",), keys=_keys(), build=build, names=table)
