"""What families with DeepSeek's sparse attention share: the keys of the indexer, and which layers have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from asbuilt.families.shared import latent, predictors
from asbuilt.families.shared.dimensions import with_predictors
from asbuilt.families.shared.key import Key, Only, Size, Values, but
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import REFUSED, ConfigReader
from asbuilt.spec import Block, GatedMLP, Indexer, LanguageModel, LatentAttention, LayerNorm, SharedChoice

EPS = 1e-6  # of the keys' norm, whatever rms_norm_eps says
KINDS = ("full", "shared")
STEMS = {
    f"attention.body.indexer.{part}": f"self_attn.indexer.{name}"
    for part, name in (("q", "wq_b"), ("k", "wk"), ("k_norm", "k_norm"), ("weigh", "weights_proj"))
}
NAMES = predictors.named(replace(latent.PLAIN_NAMES, stems=latent.STEMS | STEMS))


def build(
    *,
    index_heads: int,
    index_width: int,
    index_top_k: int,
    index_layers: Sequence[bool] = (),
    pairing: Literal["halves", "adjacent"],
    dense: Sequence[int] = (),
    n_predictors: int = 0,
    **values: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model of `latent.build`, in which the layers of `index_layers` choose keys, None for all of them.

    The others share the last choice. A prediction layer has an indexer of its own.
    """
    indexer = Indexer(
        d_model=values["d_model"],
        q_rank=values["q_rank"],
        n_heads=index_heads,
        d_head=index_width,
        top_k=index_top_k,
        k_norm=LayerNorm(d=index_width, eps=EPS),
        positions=replace(values["rotary"], pairing=pairing),
    )
    spec = latent.build(indexer=indexer, dense=dense, **values)
    whole = spec.blocks[-1]
    if n_predictors:
        assert spec.norm is not None
        spec = with_predictors(spec, whole, spec.norm, n_predictors)
    kinds = {id(block): _sharing(block, index_top_k) for block in spec.blocks}
    layers = index_layers or [True for _ in spec.blocks]
    blocks = (block if own else kinds[id(block)] for block, own in zip(spec.blocks, layers, strict=True))
    return replace(spec, blocks=tuple(blocks))


def _sharing(block: Block, top_k: int) -> Block:
    """Returns the block with the choice of the last indexer."""
    first, *others = block.branches
    body = replace(first.body, indexer=SharedChoice(top_k=top_k))  # type: ignore[call-arg]  # of build's own making
    return replace(block, branches=(replace(first, body=body), *others))


def _first(parts: Parts) -> Indexer:
    body = parts.expect(parts.mixer, LatentAttention, "blocks.0.attention.body")
    return parts.expect(body.indexer, Indexer, "blocks.0.attention.body.indexer")


def _at(name: str) -> Any:  # noqa: ANN401
    return lambda parts: getattr(_first(parts), name)


class DenseLayers:
    """`mlp_layer_types`, dense or sparse, which overrules the number of first layers without experts."""

    key = "mlp_layer_types"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the list; raises InputError unless it names every layer, and one of them is sparse."""
        if not reader.given(self.key):
            return
        said, n_layers = reader.config[self.key], values["n_layers"]
        ok = isinstance(said, list) and len(said) == n_layers and all(x in ("dense", "sparse") for x in said)
        reader.require(self.key, ok and "sparse" in said, f"a list of {n_layers} values, dense or sparse, one sparse")
        reader.overruled("first_k_dense_replace", self.key)
        values["dense"] = tuple(i for i, kind in enumerate(said) if kind == "dense")
        values["n_dense"] = 0

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        bodies = [block.branches[-1].body for block in parts.model.blocks]
        return {self.key: ["dense" if isinstance(body, GatedMLP) else "sparse" for body in bodies]}


class SharedLayers:
    """`indexer_types`: full where a layer chooses keys, shared where it reuses the last choice.

    Without the list, `index_topk_pattern` has a letter for each layer, F or S, or a list of the names; else of the
    layers from `index_skip_topk_offset` on one in `index_topk_freq` chooses.
    """

    older = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers; raises InputError if the first has no choice to share."""
        n_layers, key = values["n_layers"], "indexer_types"
        frequency = reader.size("index_topk_freq", default=1, null=1, least=0)
        offset = reader.size("index_skip_topk_offset", default=2, null=2, least=0)
        for name in self.older:
            reader.irrelevant(name, f"{key}, as it is written, says it")
        if reader.given(key):
            said: object = reader.config[key]
        elif reader.given("index_topk_pattern"):
            key = "index_topk_pattern"
            said = reader.config[key]
            letters = {"F": "full", "S": "shared"}
            said = [letters.get(letter, letter) for letter in said] if isinstance(said, str) else said
        else:
            key = "index_topk_freq"
            own = (max(i - offset + 1, 0) % max(frequency, 1) == 0 for i in range(n_layers))
            said = ["full" if one else "shared" for one in own]
        ok = isinstance(said, list) and len(said) == n_layers and all(isinstance(x, str) and x in KINDS for x in said)
        ok = ok and isinstance(said, list) and said[0] == "full"
        reader.require(key, ok, f"full or shared for each of {n_layers} layers, the first full")
        assert isinstance(said, list)
        values["index_layers"] = tuple(kind == "full" for kind in said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        bodies = [block.branches[0].body for block in parts.model.blocks]
        own = (isinstance(getattr(body, "indexer", None), Indexer) for body in bodies)
        return {"indexer_types": ["full" if one else "shared" for one in own]}


def keys(common: tuple[Key, ...], *more: Key, heads: int, q_rank: int, pairing: str) -> tuple[Key, ...]:
    """Returns the keys of `latent.keys` and of the indexer, whose RoPE has a `pairing` that no key says."""
    adjacent = pairing == "adjacent"
    said = "its indexers pair adjacent numbers" if adjacent else "its indexers pair the halves of what RoPE covers"
    return (
        *but(common, q_rank={"null": REFUSED, "default": q_rank}),
        Only("rope_interleave", True, None, reason="RoPE of the main attention pairs adjacent numbers in this family"),
        Only("indexer_rope_interleave", adjacent, None, reason=said),
        Only("layer_types", lambda values: ["indexed_attention"] * values["n_layers"], None, reason="all are indexed"),
        Size("index_n_heads", "index_heads", default=heads, at=_at("n_heads")),
        Size(
            "index_head_dim",
            "index_width",
            default=128,
            must=(
                lambda values: values["index_width"] >= values["d_rope"],
                lambda values: f"at least qk_rope_head_dim = {values['d_rope']}",
            ),
            at=_at("d_head"),
        ),
        Size("index_topk", "index_top_k", default=2048, at=_at("top_k")),
        DenseLayers(),
        *more,
    )
