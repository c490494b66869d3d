"""The transfo-xl family: Transformer-XL, with relative positions, a memory of hidden states, and adaptive embeddings.

Dai et al. 2019 (arXiv 1901.02860). A layer's memory holds its inputs for the last `mem_len` tokens, of which every pass
makes keys and values again. With `same_length` a token attends to `mem_len` tokens, itself included, so the result does
not depend on how a text is cut into segments. The memory starts empty, as in the paper's code; transformers started it
with zeros, to which tokens attended. transformers has no such class since release 5.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Number, Only, Size, Values, depth
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.state_space import UNLIMITED
from asbuilt.families.shared.table import TensorTable, Transpose, entry
from asbuilt.spec import (
    MLP,
    AdaptiveEmbedding,
    AdaptiveHead,
    Attention,
    Block,
    Branch,
    ClusterHead,
    LanguageModel,
    LayerNorm,
    Model,
    RelativeProjection,
    ScoreBiases,
    TokenCluster,
)
from asbuilt.spec.adaptive import MOST_CLUSTERS

SHARED = "biases"  # the name of u and v where all layers have the same
BIASES = "attention.body.positions.biases"
EVEN = "an even number (a sine and a cosine of each frequency)"


def build(
    *,
    n_vocab: int,
    cutoffs: tuple[int, ...],
    d_model: int,
    d_embedding: int,
    divisor: int,
    n_layers: int,
    n_heads: int,
    d_head: int,
    d_ff: int,
    window: int,
    max_distance: int | None,
    eps: float = 1e-5,
    own_biases: bool = True,
    pre_norm: bool = False,
    tied: bool = True,
    tied_maps: bool = True,
    name: str = "transfo-xl",
) -> LanguageModel:
    """Returns the model of these sizes; clusters begin at the `cutoffs`, each `divisor` times narrower than the last.

    `tied_maps` are those of all clusters but the first.
    """
    sizes = [end - begin for begin, end in zip((0, *cutoffs), (*cutoffs, n_vocab), strict=True)]
    widths = [d_embedding // divisor**i for i in range(len(sizes))]
    tables: list[dict[str, Any]] = [
        {"n_vocab": n, "d_model": d_model, "d_table": width} for n, width in zip(sizes, widths, strict=True)
    ]
    heads = (
        ClusterHead(cluster=i, tied=tied, tied_map=tied_maps and i > 0, n_clusters=0 if i else len(cutoffs), **table)
        for i, table in enumerate(tables)
    )
    positions = RelativeProjection(
        d_model=d_model, n_heads=n_heads, d_head=d_head, window=window, max_distance=max_distance
    )
    norm: dict[str, Any] = {"norm" if pre_norm else "sum_norm": LayerNorm(d=d_model, eps=eps)}
    ffn = Branch(name="ffn", body=MLP(d_model=d_model, d_ff=d_ff, activation="relu", bias=True), **norm)

    def block(**names: Any) -> Block:  # noqa: ANN401  # whose u and v these are
        attention = Attention(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_head,
            window=window,
            caches_input=True,
            positions=replace(positions, biases=ScoreBiases(n_heads=n_heads, d_head=d_head, **names)),
        )
        return Block(branches=(Branch(name="attention", body=attention, **norm), ffn))

    shared = (block(weights_name=SHARED), *(block(weights_from=SHARED),) * (n_layers - 1))
    return LanguageModel(
        embedding=AdaptiveEmbedding(clusters=tuple(TokenCluster(**table) for table in tables), scale=d_model**0.5),
        blocks=(block(),) * n_layers if own_biases or n_layers == 1 else shared,
        head=AdaptiveHead(clusters=tuple(heads)),
        max_positions=UNLIMITED,
        name=name,
    )


class _Clusters:
    """`cutoffs`, the first token ids of all clusters but the first, and what a cluster's width is divided by."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both; raises InputError where a cluster would have no tokens, or no width."""
        said = reader.config.get("cutoffs", [20000, 40000, 200000])
        reader.given("cutoffs")
        whole = isinstance(said, list) and all(is_whole(x) for x in said)
        ends = [0, *said, values["n_vocab"]] if whole else []
        grows = all(a < b for a, b in pairwise(ends))
        allowed = f"a list of growing token ids from 1 to below vocab_size = {values['n_vocab']}"
        reader.require("cutoffs", whole and grows and len(ends) <= MOST_CLUSTERS + 1, allowed)
        values["cutoffs"] = tuple(said)
        # 1 stores the tables of all clusters as one, and has no maps where they are as wide as the stream
        values["divisor"] = divisor = reader.size("div_val", default=4, least=2)
        wide = values["d_embedding"] // divisor ** len(said) > 0
        reader.require("div_val", wide, f"such that d_embed // div_val^{len(said)}, the narrowest width, is above 0")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns both."""
        clusters = _embedding(parts).clusters
        ends = list(accumulate(cluster.n_vocab for cluster in clusters))
        widths = [cluster.d_table for cluster in clusters]
        first = widths[0] // widths[1] if len(widths) > 1 else 2
        fits = (n for n in range(max(2, first), 1, -1) if widths == [widths[0] // n**i for i in range(len(widths))])
        return {"cutoffs": ends[:-1], "div_val": next(fits, 2)}


class _Farthest:
    """`clamp_len`, the distance beyond which all keys count as this far; 0 and -1 for none."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the distance."""
        values["max_distance"] = max(0, reader.size("clamp_len", default=1000, least=-1)) or None

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the distance."""
        return {"clamp_len": _positions(parts).max_distance or -1}


class _TiedMaps:
    """`proj_share_all_but_first`, whether the head's maps but its first are the embedding's; `tie_projs` repeats it."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the flag; raises InputError where the list says otherwise."""
        values["tied_maps"] = shared = reader.flag("proj_share_all_but_first", default=True)
        same = [False, *(shared for _ in values["cutoffs"])]
        listed = not reader.given("tie_projs") or reader.config["tie_projs"] == same
        reader.require("tie_projs", listed, f"{same}, as proj_share_all_but_first says")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the flag, and the list."""
        tied = [cluster.tied_map for cluster in _head(parts).clusters]
        return {"proj_share_all_but_first": tied[-1] or len(tied) == 1, "tie_projs": tied}


def _embedding(parts: Parts) -> AdaptiveEmbedding:
    return parts.expect(parts.model.embedding, AdaptiveEmbedding, "embedding")


def _head(parts: Parts) -> AdaptiveHead:
    return parts.expect(parts.model.head, AdaptiveHead, "head")


def _positions(parts: Parts) -> RelativeProjection:
    return parts.expect(parts.attention.positions, RelativeProjection, "blocks.0.attention.body.positions")


def _own_biases(parts: Parts) -> bool:
    found = parts.expect(_positions(parts).biases, ScoreBiases, "blocks.0.attention.body.positions.biases")
    return found.weights_name is None


def _norm_eps(parts: Parts) -> float:
    norm = parts.first.norm or parts.first.sum_norm
    return parts.expect(norm, LayerNorm, "blocks.0.attention.sum_norm").eps


STEMS = {
    "attention.norm": "dec_attn.layer_norm",
    "attention.sum_norm": "dec_attn.layer_norm",
    "attention.body.o": "dec_attn.o_net",
    "attention.body.positions": "dec_attn.r_net",
    f"{BIASES}.keys": "dec_attn.r_w_bias",
    f"{BIASES}.distances": "dec_attn.r_r_bias",
    "ffn.norm": "pos_ff.layer_norm",
    "ffn.sum_norm": "pos_ff.layer_norm",
    "ffn.body.up": "pos_ff.CoreNet.0",
    "ffn.body.down": "pos_ff.CoreNet.3",
}
LAYERS = "transformer.layers"
COMPUTED = {r"transformer\.pos_emb\.inv_freq": "frequencies of the sinusoids, which are computed"}


def _outside(n_clusters: int) -> dict[str, str]:
    """Returns the names of tables and maps of the embedding, of the head's own, and of its biases."""
    found = {f"head.clusters.0.cluster_{kind}": f"crit.cluster_{kind}" for kind in ("weight", "bias")}
    for i in range(n_clusters):
        found[f"embedding.clusters.{i}"] = f"transformer.word_emb.emb_layers.{i}"
        found[f"embedding.clusters.{i}.project.weight"] = f"transformer.word_emb.emb_projs.{i}"
        found[f"head.clusters.{i}"] = f"crit.out_layers.{i}"
        found[f"head.clusters.{i}.project.weight"] = f"crit.out_projs.{i}"
    return found


def names(spec: Model, family: str) -> TensorTable:
    """Returns the table; what is tied, and biases that all layers share, may be stored again under each name."""
    head = expect(spec.head, AdaptiveHead, "head", family)
    own = _own_biases(Parts(spec, family, {}))
    one = Names(
        stems=STEMS,
        outside=_outside(len(head.clusters)),
        layers=LAYERS,
        fused={"dec_attn.qkv_net": Fused.qkv()},
        layouts={f"head.clusters.{i}.project": Transpose() for i in range(len(head.clusters))},
        elsewhere=() if own else (BIASES,),
    )
    again: dict[str, str] = {}
    for i, cluster in enumerate(head.clusters):
        again |= {f"crit.out_layers.{i}.weight": f"embedding.clusters.{i}.weight"} if cluster.tied else {}
        again |= {f"crit.out_projs.{i}": f"embedding.clusters.{i}.project.weight"} if cluster.tied_map else {}
    entries = one.entries(spec, family)
    for kind, stored in (("keys", "r_w_bias"), ("distances", "r_r_bias")):
        path = f"blocks.0.{BIASES}.{kind}"
        if not own:
            entries.append(entry(path, f"transformer.{stored}"))
            again |= {f"{LAYERS}.{i}.dec_attn.{stored}": path for i in range(spec.n_layers)}
        elif spec.n_layers == 1:  # its own, or those that all layers share
            again[f"transformer.{stored}"] = path
    return TensorTable(entries=tuple(entries), ignored=COMPUTED, duplicates=again)


FAMILY = Family(
    name="transfo-xl",
    prefix="transformer.",
    heads=("TransfoXLLMHeadModel",),
    ends=lambda name: {},
    keys=(  # defaults as in the last TransfoXLConfig
        Size("vocab_size", "n_vocab", default=267735),
        Size("d_model", "d_model", default=1024, must=(lambda values: values["d_model"] % 2 == 0, EVEN)),
        Size("d_embed", "d_embedding", default=1024, at=lambda parts: _embedding(parts).clusters[0].d_table),
        _Clusters(),
        depth("n_layer", 18),
        Size("n_head", "n_heads", default=16),
        Size("d_head", "d_head", default=64),
        Size("d_inner", "d_ff", default=4096),
        Size("mem_len", "window", default=1600),
        _Farthest(),
        Only("same_length", True, reason="otherwise how far a token attends depends on where segments begin"),
        Flag("untie_r", "own_biases", default=True, at=_own_biases),
        Flag("pre_lnorm", "pre_norm", default=False, at=lambda parts: parts.first.norm is not None),
        Flag("tie_word_embeddings", "tied", default=True, also=("tie_weight",), at=lambda p: _head(p).clusters[0].tied),
        _TiedMaps(),
        Number("layer_norm_epsilon", "eps", default=1e-5, most=1.0, at=_norm_eps),
        Only("attn_type", 0, reason="only attention with projected distances is read"),
        Only("adaptive", True, reason="only the adaptive softmax is read"),
        Only("sample_softmax", -1, 0, reason="a sampled softmax has another head"),
        Irrelevant("training only", "dropatt", "init", "init_range", "init_std", "proj_init_std"),
        Irrelevant("how a text was cut into segments in training and evaluation", "tgt_len", "ext_len", "eval_len"),
    ),
    build=build,
    names=names,
)
