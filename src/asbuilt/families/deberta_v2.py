"""The deberta-v2 family: bert whose scores also depend on embeddings of distances, as keys and as queries.

He et al. 2020 (arXiv 2006.03654), and 2021 for v3 (arXiv 2111.09543), whose models are published under this name too.
The maps of keys and queries are those of the tokens; models with separate ones for distances are refused. v2-xlarge
adds a convolution of the embeddings after its first layer. In a file of v3's authors the head has other names, by which
it is read as well; transformers leaves it aside there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import bert
from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, Values, but
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.spec import (
    Attention,
    Branch,
    CentredConvolution,
    Disentangled,
    DistanceTable,
    LayerNorm,
    Model,
    PoolerActivation,
    TextEncoder,
)

STEMS = bert.STEMS | {
    "attention.body.q": "attention.self.query_proj",
    "attention.body.k": "attention.self.key_proj",
    "attention.body.v": "attention.self.value_proj",
}
OUTSIDE = bert.HEAD | {"relative": "deberta.encoder.rel_embeddings", "relative.norm": "deberta.encoder.LayerNorm"}
POOLER = {r"pooler\..*": "the map before the labels of a text, which this class lacks"}
UNUSED = POOLER | {r"(mask_predictions|classifier)\..*": "the head of another class"}
AUTHORS = (
    ("cls.predictions.bias", "lm_predictions.lm_head.bias"),
    ("cls.predictions.transform", "lm_predictions.lm_head"),
)
CONVOLVED = {
    "convolution.body.taps": "deberta.encoder.conv.conv.weight",
    "convolution.body.bias": "deberta.encoder.conv.conv.bias",
    "convolution.sum_norm.weight": "deberta.encoder.conv.LayerNorm.weight",
    "convolution.sum_norm.bias": "deberta.encoder.conv.LayerNorm.bias",
}
MOST_TAPS = 1025
CONVOLUTION_ACTIVATIONS: dict[str, PoolerActivation] = {"tanh": "tanh", **ACTIVATION_NAMES}
KINDS = {"to_queries": "p2c", "to_keys": "c2p"}


def build(
    *,
    distances: Disentangled | None = None,
    normed: bool = False,
    absolute: bool = True,
    convolution: CentredConvolution | None = None,
    eps: float = 1e-7,
    **sizes: Any,  # noqa: ANN401  # what bert's `build` takes
) -> Model:
    """Returns the model of these sizes; scores count the embedded `distances`, which may be `normed`.

    Positions are added to the embedding if `absolute`; a `convolution` of it is added to the first block's result,
    before a norm. Scores are divided by the root of d_head times the number of their terms.
    """
    spec = bert.build(eps=eps, **sizes)
    assert isinstance(spec, TextEncoder)
    spec = spec if absolute else replace(spec, positions=None)
    spec = spec if distances is None else _distant(spec, distances, normed, eps)
    if convolution is None:
        return spec
    norm = LayerNorm(d=spec.d_model, eps=eps)
    more = Branch(name="convolution", body=convolution, sum_norm=norm, block_input=True)
    first = replace(spec.blocks[0], branches=(*spec.blocks[0].branches, more))
    return replace(spec, blocks=(first, *spec.blocks[1:]))


def _distant(spec: TextEncoder, distances: Disentangled, normed: bool, eps: float) -> TextEncoder:
    """Returns the model whose scores count embedded distances."""
    attention, ffn = spec.blocks[0].branches
    body = attention.body
    assert isinstance(body, Attention)
    scale = (body.d_head * (1 + distances.to_keys + distances.to_queries)) ** -0.5
    own = replace(attention, body=replace(body, positions=distances, scale=scale))
    table = DistanceTable(n_rows=distances.n_rows, d_model=spec.d_model, eps=eps if normed else None)
    block = replace(spec.blocks[0], branches=(own, ffn))
    return replace(spec, relative=table, blocks=(block,) * spec.n_layers)


class Distances:
    """The keys that say how scores depend on distances."""

    own = ("pos_att_type", "position_buckets", "max_relative_positions", "share_att_key", "norm_rel_ebd")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads all of them into `distances` and `normed`."""
        on = reader.flag("relative_attention", default=False)
        kinds = self._kinds(reader)
        normed = reader.choice("norm_rel_ebd", choices={"none": False, "layer_norm": True}, default="none")
        buckets, far = (self._whole(reader, key) for key in ("position_buckets", "max_relative_positions"))
        shared = reader.flag("share_att_key", default=False)
        values |= {"distances": None, "normed": normed}
        if not on:
            reader.require("pos_att_type", not kinds, "none without relative_attention")
            reader.require("norm_rel_ebd", not normed, "none without relative_attention")
            for key in self.own:
                reader.irrelevant(key, "without relative_attention it says nothing")
            return
        reader.require("pos_att_type", bool(kinds), "c2p, p2c, or both as p2c|c2p, with relative_attention")
        reader.require("share_att_key", shared, "true: separate maps of distances are not supported")
        far = values["max_positions"] if far < 1 else far
        spaced = buckets > 0
        reader.require("position_buckets", not spaced or 2 <= buckets < 2 * (far - 1), f"-1, or 2 to {2 * far - 3}")
        terms = {name: kind in kinds for name, kind in KINDS.items()}
        values["distances"] = Disentangled(
            span=buckets if spaced else far, max_distance=far if spaced else None, **terms
        )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys as a config has them."""
        positions, table = parts.attention.positions, parts.model.relative
        if positions is None:
            return {"relative_attention": False}
        positions = parts.expect(positions, Disentangled, "blocks.0.attention.body.positions")
        table = parts.expect(table, DistanceTable, "relative")
        spaced = positions.max_distance is not None
        return {
            "relative_attention": True,
            "pos_att_type": "|".join(kind for name, kind in KINDS.items() if getattr(positions, name)),
            "position_buckets": positions.span if spaced else -1,
            "max_relative_positions": positions.max_distance if spaced else positions.span,
            "share_att_key": True,
            "norm_rel_ebd": "none" if table.eps is None else "layer_norm",
        }

    def _kinds(self, reader: ConfigReader) -> set[str]:
        """Returns the terms of the scores: a list of them, or one text."""
        said = reader.config["pos_att_type"] if reader.given("pos_att_type") else []
        named = [one.strip() for one in said.lower().split("|")] if isinstance(said, str) else said
        ok = isinstance(named, list) and all(one in KINDS.values() for one in named)
        reader.require("pos_att_type", ok, "c2p, p2c, or both as p2c|c2p")
        return set(named)

    def _whole(self, reader: ConfigReader, key: str) -> int:
        """Returns a number, -1 for none."""
        reader.known.add(key)
        said = reader.config.get(key, -1)
        reader.require(key, is_whole(said) and -1 <= said <= 2**24, "a whole number, -1 for none")
        return said


class Convolution:
    """The keys of the convolution after the first layer; there is none without `conv_kernel_size`."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads its width and activation into `convolution`."""
        reader.known.add("conv_kernel_size")
        kernel = reader.config.get("conv_kernel_size", 0)
        ok = is_whole(kernel) and (kernel == 0 or (kernel % 2 == 1 and 0 < kernel <= MOST_TAPS))
        reader.require("conv_kernel_size", ok, f"0 for none, or an odd number to {MOST_TAPS}")
        values["convolution"] = None
        if kernel == 0:
            for key in ("conv_act", "conv_groups"):
                reader.irrelevant(key, "of the convolution that this model does not have")
            return
        name = reader.choice("conv_act", choices=CONVOLUTION_ACTIVATIONS, default="tanh")
        reader.require("conv_groups", reader.size("conv_groups", default=1) == 1, "1: groups are not supported")
        values["convolution"] = CentredConvolution(d_model=values["d_model"], kernel=kernel, activation=name)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys as a config has them."""
        found = _convolution(parts.model)
        if found is None:
            return {}
        name = next(name for name, meant in CONVOLUTION_ACTIVATIONS.items() if meant == found.activation)
        return {"conv_kernel_size": found.kernel, "conv_act": name}


def _convolution(spec: Model) -> CentredConvolution | None:
    """Returns the convolution in the first block."""
    bodies = (branch.body for branch in spec.blocks[0].branches)
    return next((body for body in bodies if isinstance(body, CentredConvolution)), None)


def _n_types(parts: Parts) -> int:
    types = getattr(parts.model, "types", None)
    return 0 if types is None else types.n_types


def _ends(name: str) -> dict[str, End]:
    labels = End(
        labels="first",
        transform=bert.pooler("gelu"),
        stems={"head": "classifier", "head.transform.dense": "pooler.dense"},
    )
    return {
        f"{name}Model": End(unused=POOLER),
        f"{name}ForSequenceClassification": labels,
        f"{name}ForMultipleChoice": replace(labels, n_labels=1),
        **bert.token_ends(name, POOLER),
    }


def _names(spec: Model, family: str) -> TensorTable:
    """Returns the table; a file may hold positions although none are added."""
    again, other = "cls.predictions.decoder", ("convolution.body", "convolution.sum_norm")
    table = bert.names(spec, family, "deberta", OUTSIDE, again, UNUSED, STEMS, elsewhere=other)
    if _convolution(spec) is not None:
        more = (entry(f"blocks.0.{path}", name) for path, name in CONVOLVED.items())
        table = replace(table, entries=(*table.entries, *more))
    left = {r"deberta\.embeddings\.position_embeddings\..*": "positions, which are not added to these embeddings"}
    if spec.head is None:
        return table
    ignored = table.ignored | (left if spec.positions is None else {})
    return replace(table, ignored=ignored, spellings=(AUTHORS,))


SAME_WIDTH = "embeddings of another width are not supported in this family"
FAMILY = replace(
    bert.FAMILY,
    name="deberta-v2",
    prefix="deberta.",
    heads=("DebertaV2ForMaskedLM",),
    ends=_ends,
    prepare=lambda config, name: config,
    keys=(  # defaults as in transformers' DebertaV2Config
        *but(
            bert.keys(128100, Size("max_position_embeddings", "max_positions", default=512)),
            d_model={"default": 1536},
            n_heads={"default": 24},
            n_layers={"default": 24},
            d_ff={"default": 6144},
            n_types={"default": 0, "least": 0, "at": _n_types},
            eps={"default": 1e-7},
        ),
        Flag("position_biased_input", "absolute", default=True, at=lambda parts: parts.model.positions is not None),
        Distances(),
        Convolution(),
        Only("embedding_size", lambda values: values["d_model"], reason=SAME_WIDTH),
        Only(
            "attention_head_size",
            lambda values: values["d_model"] // values["n_heads"],
            reason="heads are as wide as hidden_size / num_attention_heads",
        ),
        Only("pooler_hidden_size", lambda values: values["d_model"], reason="the map before labels keeps the width"),
        Only("pooler_hidden_act", "gelu", reason="only gelu is read before the labels of a text"),
        Only("legacy", True, reason="the head has other names there"),
        Irrelevant("training only", "pooler_dropout", "cls_dropout"),
    ),
    build=build,
    names=_names,
)
