"""The minimax_m3_vl_text family: each key head attends to blocks of keys of its choice; clipped gates, a shared expert.

MiniMax 2026, the model card and published code of MiniMax-M3. The first layers have no experts and attend to all keys.
transformers rotates the part of a head that `partial_rotary_factor` says, whole heads without it, whatever `rotary_dim`
says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared import experts
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Number, Only, Size, Values, but
from asbuilt.families.shared.names import ATTENTION, GATED, NORMS, QK_NORMS, SHARED_EXPERTS, Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import FULL, RMS_EPS, HeadWidth, sizes
from asbuilt.families.shared.table import Concat, EachExpert, Entry, entry
from asbuilt.spec import Block, BlockIndexer, ClampedGate, LanguageModel, MixtureOfExperts, RMSNorm, Router

SPARSE = "minimax_m3_sparse"
MTP = {r"(.*\.)?mtp\..*": "prediction layers, which are not built"}
INDEXER = {f"attention.body.indexer.{part}": part for part in ("q", "k", "q_norm", "k_norm")}
STEMS = NORMS | ATTENTION | QK_NORMS
# The object that published configs have for what newer ones have beside the other keys.
OBJECT, FREQUENCY = "sparse_attention_config", "sparse_attention_freq"
OLDER = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def build(
    router: Router,
    *,
    d_expert: int,
    d_shared: int,
    alpha: float,
    limit: float,
    chooses: Sequence[bool],
    choice: dict[str, Any],
    dense: Collection[int] = (),
    eps: float = 1e-6,
    n_dense: int = 0,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes; layers in `dense` have no experts, those that it `chooses` an indexer."""
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps, gain="offset")
    head_norm, gate = replace(norm, d=made.head_width), ClampedGate(alpha=alpha, limit=limit)
    whole = made.attention(q_norm=head_norm, k_norm=head_norm)
    mlp = made.gated(clamp=gate)
    mixture = replace(made.mixture(router, d_expert), gating=gate, shared=replace(mlp, d_ff=d_shared))

    def block(sparse: bool, chosen: bool) -> Block:
        attention = whole
        if chosen:
            normed = replace(norm, d=choice["d_head"])
            indexer = BlockIndexer(d_model=made.d_model, positions=made.rotary, q_norm=normed, k_norm=normed, **choice)
            attention = replace(whole, indexer=indexer)
        return pre_norm(attention, mixture if sparse else mlp, norm)

    layers = [(i >= n_dense and i not in dense, chosen) for i, chosen in enumerate(chooses)]
    kinds = {layer: block(*layer) for layer in set(layers)}
    return made.model(tuple(kinds[layer] for layer in layers), norm)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with the newer keys in the place of the older object and lists of 0 and 1."""
    said, inner = dict(config), config.get(OBJECT)
    if isinstance(inner, dict):
        said |= {key: inner[old] for key, old in OLDER.items() if old in inner}
        marks = inner.get(FREQUENCY)
        if said.get("layer_types") is None and isinstance(marks, list):
            said["layer_types"] = [SPARSE if one else FULL for one in marks]
        kept = {key: value for key, value in inner.items() if key not in {*OLDER.values(), FREQUENCY}}
        said = {key: value for key, value in said.items() if key != OBJECT} | ({OBJECT: kept} if kept else {})
    marks = said.get("moe_layer_freq")
    if isinstance(marks, list):
        del said["moe_layer_freq"]
        if said.get("mlp_layer_types") is None:
            said["mlp_layer_types"] = ["sparse" if one else "dense" for one in marks]
    return said


class _Choice:
    """Which layers choose blocks of keys, and how: as many indexer heads as key heads, and four sizes."""

    heads = "index_n_heads"
    sizes = (
        ("index_head_dim", "d_head", 128),
        ("index_block_size", "block", 128),
        ("index_topk_blocks", "top_k", 16),
        ("index_local_blocks", "local", 1),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers and the sizes, which are carried where no layer chooses."""
        types = read_layer_types(reader, (FULL,) * values["n_layers"], (FULL, SPARSE))
        values["chooses"] = tuple(kind == SPARSE for kind in types)
        values["choice"] = {into: reader.size(key, default=usual) for key, into, usual in self.sizes}
        values["choice"]["n_heads"] = heads = reader.size(self.heads, default=4)
        if SPARSE not in types:
            for key in (self.heads, *(key for key, _, _ in self.sizes)):
                reader.unused(key, "no layer chooses keys")
            return
        same = heads == values["n_kv_heads"]
        reader.require(self.heads, same, f"num_key_value_heads = {values['n_kv_heads']}, one choice for each")
        width, top_k = values["rotary"].d_rotary, values["choice"]["top_k"]
        reader.require("index_head_dim", values["choice"]["d_head"] >= width, f"at least {width}, which RoPE covers")
        reader.require("index_local_blocks", values["choice"]["local"] <= top_k, f"at most index_topk_blocks = {top_k}")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the layers and the sizes."""
        found = [layer.indexer for layer in parts.attentions]
        types = {"layer_types": [FULL if one is None else SPARSE for one in found]}
        indexer = next((one for one in found if one is not None), None)
        if indexer is None:
            return types
        return types | {self.heads: indexer.n_heads} | {key: getattr(indexer, into) for key, into, _ in self.sizes}


class _Object(Irrelevant):
    """What an older config says of the choice beside its sizes, which is the same for all."""

    def __init__(self) -> None:
        super().__init__("all that it may say is the same for all", OBJECT)

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object."""
        inner = reader.nested(OBJECT)
        if inner is not None:
            inner.only("use_sparse_attention", True, reason="layer_types says which layers choose keys")
            inner.only("sparse_score_type", "max", reason="a block counts by its largest score")
            inner.only("sparse_init_block", 0, reason="no first blocks are always chosen")
            off = [int(one) for one in values["chooses"]]
            inner.only("sparse_disable_index_value", off, [1] * len(off), reason="indexers have no values")
            inner.finish()
        super().read(reader, values)


class _Kinds(experts.LayerKinds):
    """Which layers have experts: all unless the list says otherwise."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the list."""
        values |= {"n_dense": 0, "dense": frozenset()}
        super().read(reader, values)


class _Rope(Rope):
    """The keys of RoPE, on whole heads unless a factor says otherwise, whatever `rotary_dim` says."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys."""
        super().read(reader, values)
        key, found = "rotary_dim", values["rotary"].d_rotary
        if reader.given(key) and reader.config[key] != found:
            reader.note(key, "transformers does not read it", f"RoPE covers {found} numbers of a head")
        reader.irrelevant(key, "partial_rotary_factor, as it is written, says it")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys."""
        return super().write(parts) | {"rotary_dim": self.at(parts).d_rotary}


def _stacked(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of experts in stacks, gate and up as one."""
    both = EachExpert(Concat((part.d_ff, part.d_ff)))
    return [
        Entry(paths=("gate", "up"), names=("mlp.experts.gate_up_proj",), layout=both),
        entry("down", "mlp.experts.down_proj"),
    ]


def _fused(name: str, at: str) -> dict[str, Fused]:
    return {f"{name}.gate_up_proj": Fused(stems=(f"{at}.gate", f"{at}.up"))}


NAMES = Names(
    stems=STEMS
    | {"ffn.body.down": GATED["ffn.body.down"], "ffn.body.shared.down": SHARED_EXPERTS["ffn.body.shared.down"]}
    | {"ffn.body.router": "mlp.gate", "ffn.body.router.correction": "mlp.gate.e_score_correction_bias"}
    | {path: f"self_attn.indexer.{part}{'' if 'norm' in part else '_proj'}" for path, part in INDEXER.items()},
    fused=_fused("mlp", "ffn.body") | _fused("mlp.shared_experts", "ffn.body.shared"),
    stacked=_stacked,
    ignored=MTP,
)
# of published folders, whose text is within a whole
PUBLISHED = Names(
    stems=STEMS
    | GATED
    | {path: name.replace("mlp.", "block_sparse_moe.") for path, name in SHARED_EXPERTS.items()}
    | {"ffn.body.router": "block_sparse_moe.gate"}
    | {"ffn.body.router.correction": "block_sparse_moe.e_score_correction_bias"}
    | {
        path: f"self_attn.index_{part}" if "norm" in part else f"self_attn.index_{part}_proj"
        for path, part in INDEXER.items()
    },
    experts={
        part: f"block_sparse_moe.experts.{{}}.{w}.weight" for part, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    ignored=MTP,
)

FAMILY = Family(
    name="minimax_m3_vl_text",
    heads=("MiniMaxM3VLForCausalLM",),
    ends=lambda name: decoder_ends("MiniMaxM3VLText"),
    prepare=prepared,
    keys=(  # defaults as in transformers' MiniMaxM3VLTextConfig
        Only("hidden_act", "silu", "swigluoai", reason="gates are clamped silus, whatever a config says"),
        *but(
            sizes(n_vocab=200064, d_model=6144, d_ff=12288, n_layers=60, n_heads=64, n_kv_heads=4, context=524288),
            d_head=HeadWidth(128),
            rotary=_Rope(theta=5e6, partial=1.0),
            activation=None,
            d_ff=lambda key: experts.dense(replace(key, key="dense_intermediate_size")),
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_local_experts", "num_experts", n_experts=128, top_k=4),
            experts.routed_scale(2.0),
            Only("scoring_func", "sigmoid", reason="this family scores by sigmoid"),
            Only("use_routing_bias", True, reason="scores of this family are always corrected for the choice"),
            scoring="sigmoid",
            correction=True,
            renormalise=True,
        ),
        Size("intermediate_size", "d_expert", default=3072, at="mixture.d_ff"),
        Size("shared_intermediate_size", "d_shared", default=3072, at="mixture.shared.d_ff"),
        Number("swiglu_alpha", "alpha", default=1.702, at="mixture.gating.alpha"),
        Number("swiglu_limit", "limit", default=7.0, at="mixture.gating.limit"),
        RMS_EPS,
        _Choice(),
        _Object(),
        _Kinds(),
        Only("n_shared_experts", 1, reason="there is one shared expert"),
        Only("use_gemma_norm", True, reason="gains of this family's norms are stored less 1"),
        Only("use_qk_norm", True, reason="queries and keys are always normed in this family"),
        Only("qk_norm_type", "per_head", reason="a norm of this family is of each head"),
        Irrelevant("prediction layers are not built", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
    build=build,
    names=NAMES,
)
