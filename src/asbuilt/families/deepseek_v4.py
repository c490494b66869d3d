"""The deepseek_v4 family: compressed attention, residual streams with hyper-connections, experts by token id at first.

DeepSeek-AI 2026. Names on disk as on the hub. Layers for multi-token prediction are stored beside it and not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Irrelevant, Number, Only, Size, Values, but, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import ORIGINAL, read_scaling, write_rotary
from asbuilt.families.shared.sizes import EVEN, sizes
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import (
    Block,
    ClampedGate,
    CompressedAttention,
    Compressor,
    EntryIndexer,
    GatedMLP,
    HyperConnection,
    LanguageModel,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    StreamMerge,
    YaRN,
)

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {SPARSE: 4, HEAVY: 128}
BY_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
SCORINGS = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}


def build(
    *,
    d_rope: int,
    q_rank: int,
    window: int,
    groups: int,
    o_rank: int,
    kinds: Sequence[str],
    ratios: dict[str, int],
    hashed: Sequence[bool],
    main: Rotary,
    compressed: Rotary,
    index_heads: int,
    index_width: int,
    index_top_k: int,
    router: Router,
    limit: float,
    n_streams: int,
    iterations: int,
    stream_eps: float,
    eps: float,
    **values: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model, each layer of its kind, experts of those in `hashed` chosen by token id."""
    made = sized(values)
    norm, d_model, d_head = RMSNorm(d=made.d_model, eps=eps), made.d_model, made.head_width
    attention = CompressedAttention(
        d_model=d_model,
        n_heads=made.n_heads,
        d_head=d_head,
        q_rank=q_rank,
        window=window,
        groups=groups,
        o_rank=o_rank,
        q_norm=RMSNorm(d=q_rank, eps=eps),
        head_norm=RMSNorm(d=d_head, eps=eps, gain="none"),
        kv_norm=RMSNorm(d=d_head, eps=eps),
        positions=main,
    )

    def compressor(kind: str, width: int) -> Compressor:
        return Compressor(
            d_model=d_model,
            d_head=width,
            ratio=ratios[kind],
            overlap=kind == SPARSE,
            norm=RMSNorm(d=width, eps=eps),
            positions=compressed,
        )

    indexer = EntryIndexer(
        q_rank=q_rank, n_heads=index_heads, top_k=index_top_k, compressor=compressor(SPARSE, index_width)
    )
    mixers = {
        SLIDING: attention,
        HEAVY: replace(attention, positions=compressed, compressor=compressor(HEAVY, d_head)),
        SPARSE: replace(attention, positions=compressed, compressor=compressor(SPARSE, d_head), indexer=indexer),
    }
    streams = HyperConnection(n_streams=n_streams, d_model=d_model, eps=stream_eps, norm_eps=eps, iterations=iterations)

    def block(kind: str, by_token: bool) -> Block:
        own = replace(router, correction=False, table=made.n_vocab) if by_token else router
        ffn = _clamped(made.mixture(own, n_shared=1), limit)
        branches = pre_norm(mixers[kind], ffn, norm).branches
        return Block(branches=tuple(replace(branch, streams=streams) for branch in branches))

    layers = list(zip(kinds, hashed, strict=True))
    blocks = {layer: block(*layer) for layer in set(layers)}
    merge = StreamMerge(n_streams=n_streams, d_model=d_model, eps=stream_eps, norm_eps=eps)
    return made.model(tuple(blocks[layer] for layer in layers), norm, streams=merge)


def _clamped(ffn: MixtureOfExperts, limit: float) -> MixtureOfExperts:
    clamp = ClampedGate(alpha=1.0, limit=limit, shift=False)
    assert isinstance(ffn.shared, GatedMLP)
    return replace(ffn, gating=clamp, shared=replace(ffn.shared, clamp=clamp))


def _attention(parts: Parts, compressing: bool | None = None, kind: str = "") -> CompressedAttention | None:
    """Returns the first layer's attention, or the first that compresses or not, of one kind."""
    bodies = [
        parts.expect(b.branches[0].body, CompressedAttention, "blocks.attention.body") for b in parts.model.blocks
    ]
    found = (
        body
        for body in bodies
        if (compressing is None or (body.compressor is not None) == compressing) and kind in ("", _kind(body))
    )
    return next(found, None)


def _kind(body: CompressedAttention) -> str:
    return SLIDING if body.compressor is None else SPARSE if body.indexer is not None else HEAVY


def _of_indexer(key: str, into: str, field: str, default: int) -> Size:
    """Returns the key of a field of the indexers; where no layer has one, it is as carried."""

    def found(parts: Parts) -> object:
        body = _attention(parts, kind=SPARSE)
        if body is None or body.indexer is None:
            return parts.carried.get(key, default)
        return getattr(body.indexer, field)

    return Size(key, into, default=default, at=found, carried="of layers with an indexer, where there are any")


class Ropes:
    """The RoPE of layers without entries, `main`, and that of the others and of entries, which may be stretched.

    Older configs have two bases and one scaling, of the second; newer ones an object for each. YaRN leaves cos and sin
    as they are here.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the width and both."""
        d_head = values["d_head"]
        part = reader.number("partial_rotary_factor", default=0.125, null=0.125, most=1.0)
        width = reader.size("qk_rope_head_dim", default=int(d_head * part), derived=True)
        reader.require("qk_rope_head_dim", width % 2 == 0 and width <= d_head, f"{EVEN}, at most head_dim = {d_head}")
        reader.irrelevant("partial_rotary_factor", "qk_rope_head_dim, as it is written, says it")
        values["d_rope"] = width
        bases = [reader.number("rope_theta", default=1e4), reader.number("compress_rope_theta", default=1.6e5)]
        for key in ("rope_theta", "compress_rope_theta"):
            reader.irrelevant(key, "of a kind that no layer may be of")
        inner = reader.nested("rope_parameters", "rope_scaling")
        both: list[ConfigReader | None] = [None, inner]
        if inner is not None and inner.given("main") and inner.given("compress"):
            both = [inner.nested("main"), inner.nested("compress")]
            inner.irrelevant("rope_type", "each object inside says its own")
            inner.finish()
            inner = None
        for name, base, one in zip(("main", "compressed"), bases, both, strict=True):
            values[name] = self._one(one, base, width, d_head, values["max_positions"], own=inner is None)

    def _one(
        self, inner: ConfigReader | None, base: float, width: int, d_head: int, context: int, *, own: bool
    ) -> Rotary:
        rotary = Rotary(d_rotary=width, theta=base, pairing="adjacent")
        if inner is None:
            return rotary
        theta = inner.number("rope_theta", default=base)
        part = inner.number("partial_rotary_factor", default=width / d_head, null=width / d_head, most=1.0)
        inner.require(
            "partial_rotary_factor", int(d_head * part) == width, f"the part that RoPE covers, {width} of {d_head}"
        )
        original = inner.size(ORIGINAL) if ORIGINAL in inner.config else context
        scaling = read_scaling(inner, original, context, width)
        if isinstance(scaling, YaRN) and scaling.attention_factor is None:
            scaling = replace(scaling, attention_factor=1.0)
        return replace(rotary, theta=theta if own else base, scaling=scaling)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the older keys."""
        plain, stretched = (_attention(parts, compressing) for compressing in (False, True))
        rotaries = [body.positions for body in (plain, stretched) if body is not None]
        first = parts.expect(rotaries[0], Rotary, "blocks.0.attention.body.positions")
        written: dict[str, Any] = {"qk_rope_head_dim": first.d_rotary, "rope_scaling": None}
        if plain is not None:
            written["rope_theta"] = float(parts.expect(plain.positions, Rotary, "blocks.positions").theta)
        if stretched is not None:
            older = write_rotary(parts.expect(stretched.positions, Rotary, "blocks.positions"), parts.max_positions)
            written |= {"compress_rope_theta": older["rope_theta"], "rope_scaling": older["rope_scaling"]}
        return written


class Kinds:
    """`layer_types`, or `compress_ratios` of 0, 4 or 128 by layer; `compress_rates` by kind, 4 and 128 unless said.

    Without either all layers but the first two alternate between heavy and sparse. A list may go on with the
    prediction layers.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the kinds and ratios."""
        n_layers, key = values["n_layers"], "layer_types"
        rates = reader.nested("compress_rates")
        values["ratios"] = {}
        for kind, older in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
            said = reader.size(older, default=RATIOS[kind])
            values["ratios"][kind] = said if reader.given(older) or rates is None else rates.size(kind, default=said)
            reader.irrelevant(older, "compress_rates, as it is written, says it")
        if rates is not None:
            rates.finish()
        reader.irrelevant("compress_rates", "of kinds that no layer is of")
        said_kinds: object = [HEAVY, HEAVY, *(SPARSE if i % 2 else HEAVY for i in range(n_layers))][:n_layers]
        if reader.given("layer_types"):
            said_kinds = reader.config["layer_types"]
        elif reader.given("compress_ratios"):
            key = "compress_ratios"
            ratios = reader.config[key]
            listed = ratios if isinstance(ratios, list) else []
            said_kinds = [BY_RATIO.get(ratio) if isinstance(ratio, int) else None for ratio in listed]
        reader.irrelevant("compress_ratios", "layer_types, as it is written, says it")
        known = (SLIDING, *RATIOS)
        ok = isinstance(said_kinds, list) and len(said_kinds) >= n_layers and all(one in known for one in said_kinds)
        reader.require(key, ok, f"at least {n_layers} values, each one of {', '.join(known)} (or 0, 4, 128)")
        assert isinstance(said_kinds, list)
        values["kinds"] = tuple(said_kinds[:n_layers])

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types and rates."""
        bodies = [parts.expect(b.branches[0].body, CompressedAttention, "blocks.body") for b in parts.model.blocks]
        rates = {_kind(body): body.compressor.ratio for body in bodies if body.compressor is not None}
        said = parts.carried.get("compress_rates") or {}
        return {"layer_types": [_kind(body) for body in bodies], "compress_rates": RATIOS | said | rates}


class Hashed:
    """`mlp_layer_types`, hash_moe where a table by token id chooses experts; else of the first `num_hash_layers`."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers."""
        n_layers, key = values["n_layers"], "mlp_layer_types"
        first = reader.size("num_hash_layers", default=3, null=3, least=0)
        reader.irrelevant("num_hash_layers", f"{key}, as it is written, says it")
        said: object = ["hash_moe" if i < first else "moe" for i in range(n_layers)]
        if reader.given(key):
            said = reader.config[key]
        ok = isinstance(said, list) and len(said) >= n_layers and all(one in ("hash_moe", "moe") for one in said)
        reader.require(key, ok, f"hash_moe or moe for each of {n_layers} layers")
        assert isinstance(said, list)
        values["hashed"] = tuple(one == "hash_moe" for one in said[:n_layers])

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types."""
        bodies = [b.branches[-1].body for b in parts.model.blocks]
        mixtures = [parts.expect(body, MixtureOfExperts, "blocks.ffn.body") for body in bodies]
        return {"mlp_layer_types": ["moe" if one.router.table is None else "hash_moe" for one in mixtures]}


COMPRESSOR = {"kv": "wkv", "gate": "wgate", "norm": "norm", "bias": "ape"}
STEMS = {
    "attention.norm": "attn_norm",
    "ffn.norm": "ffn_norm",
    **{
        f"attention.body.{part}": f"attn.{name}"
        for part, name in {
            "q_down": "wq_a",
            "q_norm": "q_norm",
            "q_up": "wq_b",
            "kv": "wkv",
            "kv_norm": "kv_norm",
            "o_down": "wo_a.weight",
            "o_up": "wo_b",
            "sinks": "attn_sink",
            "indexer.q": "indexer.wq_b",
            "indexer.weigh": "indexer.weights_proj",
        }.items()
    },
    **{f"attention.body.compressor.{part}": f"attn.compressor.{name}" for part, name in COMPRESSOR.items()},
    **{
        f"attention.body.indexer.compressor.{part}": f"attn.indexer.compressor.{name}"
        for part, name in COMPRESSOR.items()
    },
    "ffn.body.router.weight": "ffn.gate.weight",  # its bias is the correction, not one of the router
    "ffn.body.router.correction": "ffn.gate.bias",
    "ffn.body.router.table": "ffn.gate.tid2eid",
    **{
        f"ffn.body.shared.{part}": f"ffn.shared_experts.{w}"
        for part, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
    **{
        f"{branch}.streams.{part}": f"hc_{name}_{part}"
        for branch, name in (("attention", "attn"), ("ffn", "ffn"))
        for part in ("fn", "base", "scale")
    },
}
OUTSIDE = {
    "embedding": "embed",
    "norm": "norm",
    "head": "head",
    **{f"streams.{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}

EXPERTS = {part: f"ffn.experts.{{}}.{w}.weight" for part, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}
# transformers writes names that are half the hub's and half its own
BESIDE = (
    ("embed.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
    ("hc_head_", "model.hc_head.hc_"),
)
IGNORED = {r"mtp\..*": "layers for multi-token prediction"}

NAMES = Names(stems=STEMS, outside=OUTSIDE, layers="layers", experts=EXPERTS, ignored=IGNORED)


def _table(spec: Model, family: str) -> TensorTable:
    return replace(NAMES(spec, family), spellings=(BESIDE,), older={"attn.kv_norm.weight": "attn.norm.weight"})


FAMILY = Family(
    name="deepseek_v4",
    heads=("DeepseekV4ForCausalLM",),
    prefix="",
    keys=(  # defaults as in transformers' DeepseekV4Config
        Only("hidden_act", "silu", reason="the experts of this family are gated by a clamped silu"),
        Only("attention_bias", False, reason="this family has no biases"),
        Only("mlp_bias", False, None, reason="this family has no biases"),
        Only("topk_method", "noaux_tc", reason="this family chooses by corrected scores"),
        Only("norm_topk_prob", True, reason="the weights of chosen experts are always divided by their sum"),
        Only("n_shared_experts", 1, reason="there is one shared expert, as wide as the others"),
        Irrelevant("prediction layers are not read", "num_nextn_predict_layers"),
        Irrelevant("says how experts are stored", "expert_dtype"),
        *but(
            sizes(n_vocab=129280, d_model=4096, d_ff=2048, n_layers=43, n_heads=64, context=1048576),
            rotary=None,
            activation=None,
            d_head=Size("head_dim", "d_head", default=512, at="mixer.d_head"),
            n_heads={"at": "mixer.n_heads"},
            n_kv_heads=None,
            d_ff=Size("moe_intermediate_size", "d_ff", default=2048, at="mixture.d_ff"),
        ),
        Only("num_key_value_heads", 1, reason="all heads share one key"),
        Size("q_lora_rank", "q_rank", default=1024, at="mixer.q_rank"),
        Size("sliding_window", "window", default=128, at="mixer.window"),
        Size("o_groups", "groups", default=8, divides="n_heads", at="mixer.groups"),
        Size("o_lora_rank", "o_rank", default=1024, at="mixer.o_rank"),
        Ropes(),
        Kinds(),
        Hashed(),
        _of_indexer("index_n_heads", "index_heads", "n_heads", 64),
        _of_indexer("index_head_dim", "index_width", "d_head", 128),
        _of_indexer("index_topk", "index_top_k", "top_k", 512),
        experts.TRAINING,
        experts.routed(
            *experts.counts("n_routed_experts", "num_local_experts", n_experts=256, top_k=6),
            Choice("scoring_func", "scoring", default="sqrtsoftplus", choices=SCORINGS, at="mixture.router.scoring"),
            experts.routed_scale(1.5),
            renormalise=True,
            correction=True,
            eps=experts.EPS,
        ),
        Number("swiglu_limit", "limit", default=10.0, at="mixture.gating.limit"),
        Size("hc_mult", "n_streams", default=4, at="model.streams.n_streams"),
        Size("hc_sinkhorn_iters", "iterations", default=20, at="first.streams.iterations"),
        Number("hc_eps", "stream_eps", default=1e-6, at="model.streams.eps"),
        eps("rms_norm_eps", 1e-6),
    ),
    build=build,
    names=_table,
)
