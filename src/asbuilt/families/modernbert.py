"""The modernbert family: rotary positions, LayerNorm before each branch, gated feed-forward, mostly local attention.

Warner et al. 2024 (arXiv 2412.13663). Every third layer sees everything, the others local_attention / 2 tokens on
either side, each kind with a rotary base of its own. The embedding is normed, so layer 0 does not norm what its
attention reads. Gate and up lie on disk as one tensor, the activated half first, and so do q, k and v.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    divide,
    named_entries,
    read_common,
    read_layer_types,
    require_same,
)
from asbuilt.families.shared.fused import branches, expect, outside_entries
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_scaling, write_rotary
from asbuilt.families.shared.table import Concat, Entry, Table
from asbuilt.spec import (
    Activation,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    HeadTransform,
    LayerNorm,
    Model,
    Rotary,
    TiedHead,
    TokenEmbedding,
    weights,
)

FAMILY = "modernbert"
HEADS = ("ModernBertForMaskedLM", "ModernBertModel")
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
FULL, SLIDING = "full_attention", "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}

OUTSIDE = {"embedding": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "norm": "final_norm"}
HEAD = {"head.transform.dense": "head.dense", "head.transform.norm": "head.norm", "head": "decoder"}
STEMS = {
    "attention.norm": "attn_norm",
    "attention.body.o": "attn.Wo",
    "ffn.norm": "mlp_norm",
    "ffn.body.down": "mlp.Wo",
}
FUSED = {
    "attn.Wqkv": ("attention.body.q", "attention.body.k", "attention.body.v"),
    "mlp.Wi": ("ffn.body.gate", "ffn.body.up"),
}

IRRELEVANT = {
    "training only": ("embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "sparse_pred_ignore_index"),
    "with labels only: logits that no loss looks at are then not computed": ("sparse_prediction",),
    "describes a classifier": ("classifier_pooling",),
    "how it is computed, not what": ("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    "norm_eps is what is read": ("layer_norm_eps",),
    "layer_types, as it is written, says it": ("global_attn_every_n_layers",),
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_heads: int,
    d_ff: int,
    layers: tuple[tuple[Rotary, int | None], ...],
    max_positions: int,
    eps: float,
    activation: Activation = "gelu",
    head: HeadTransform | None = None,
    tied: bool = True,
    decoder_bias: bool = True,
    norm_bias: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; `layers` are each layer's rotation and window, None sees everything.

    `head` None is a model that ends in the normed stream.
    """
    norm = LayerNorm(d=d_model, eps=eps, bias=norm_bias)
    ffn = Branch(name="ffn", norm=norm, body=GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=mlp_bias))
    blocks = []
    for i, (rotary, window) in enumerate(layers):
        body = Attention(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_model // n_heads,
            causal=False,
            positions=rotary,
            window=window,
            bias=attention_bias,
            output_bias=attention_bias,
        )
        blocks.append(Block(branches=(Branch(name="attention", norm=norm if i else None, body=body), ffn)))
    kind = TiedHead if tied else Head
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        embedding_norm=norm,
        blocks=tuple(blocks),
        norm=norm,
        head=None if head is None else kind(d_model=d_model, n_vocab=n_vocab, bias=decoder_bias, transform=head),
        max_positions=max_positions,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' ModernBertConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS, causal=False)
    for reason, keys in IRRELEVANT.items():
        for key in keys:
            reader.irrelevant(key, reason)
    reader.only("position_embedding_type", "absolute", None, reason="positions are rotary, whatever an early file says")
    reader.only("is_decoder", False, reason="as a decoder its tokens would not see those after them")
    masked = config.get("architectures") != [HEADS[1]]
    d_model = reader.size("hidden_size", default=768)
    n_heads = reader.size("num_attention_heads", default=12)
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    reader.require("num_attention_heads", d_head % 2 == 0, "a head of an even width: rotary positions turn pairs")
    context = reader.size("max_position_embeddings", default=8192)
    norm_bias = reader.flag("norm_bias", default=False)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=50368),
        "d_ff": reader.size("intermediate_size", default=1152),
        "eps": reader.number("norm_eps", default=1e-5, most=1.0),
        "activation": reader.choice("hidden_activation", choices=ACTIVATION_NAMES, default="gelu"),
        "attention_bias": reader.flag("attention_bias", default=False),
        "mlp_bias": reader.flag("mlp_bias", default=False),
        "layers": _layers(reader, d_head, context),
    }
    sizes |= _read_head(reader, d_model, sizes["eps"], norm_bias) if masked else _no_head(reader)
    reader.finish()
    spec = build(d_model=d_model, n_heads=n_heads, max_positions=context, norm_bias=norm_bias, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_head(reader: ConfigReader, d_model: int, eps: float, norm_bias: bool) -> dict[str, Any]:
    activation = reader.choice("classifier_activation", choices=ACTIVATION_NAMES, default="gelu")
    bias = reader.flag("classifier_bias", default=False)
    return {
        "head": HeadTransform(d_model=d_model, activation=activation, eps=eps, bias=bias, norm_bias=norm_bias),
        "tied": reader.flag("tie_word_embeddings", default=True),
        "decoder_bias": reader.flag("decoder_bias", default=True),
    }


def _no_head(reader: ConfigReader) -> dict[str, Any]:
    for key in ("classifier_activation", "classifier_bias", "tie_word_embeddings", "decoder_bias"):
        reader.irrelevant(key, "there is no head")
    return {}


def _layers(reader: ConfigReader, d_head: int, context: int) -> tuple[tuple[Rotary, int | None], ...]:
    """Returns each layer's rotation and window; the older key says every how many layers one sees everything."""
    depth = reader.size("num_hidden_layers", default=22, most=MOST_LAYERS)
    every = reader.size("global_attn_every_n_layers", default=3)
    reader.overruled("global_attn_every_n_layers", "layer_types")
    types = read_layer_types(reader, tuple(SLIDING if i % every else FULL for i in range(depth)))
    # half of it on either side, and the token itself
    near = reader.size("local_attention", default=128, least=0) // 2 + 1
    rotaries = _rotaries(reader, d_head, context)
    return tuple((rotaries[kind], None if kind == FULL else near) for kind in types)


def _rotaries(reader: ConfigReader, d_head: int, context: int) -> dict[str, Rotary]:
    """Returns the rotation of either kind of layer: `rope_parameters` has an object for each, older keys the bases."""
    outer = reader.nested("rope_parameters")
    found = {}
    for kind, (key, usual) in THETAS.items():
        theta = reader.number(key, default=usual, above=1.0)
        inner = None if outer is None else outer.nested(kind)
        if inner is not None and inner.spelled("rope_theta"):
            said = inner.number("rope_theta", above=1.0)
            if key in reader.config and said != theta:
                raise inner.error("rope_theta", f"disagrees with {key} outside", value=said)
            theta = said
        scaling = read_scaling(inner, context, context, d_head)
        found[kind] = Rotary(d_rotary=d_head, theta=theta, scaling=scaling)
    if outer is not None:
        outer.finish()
    return found


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    first, second = branches(spec, FAMILY)
    attention = expect(first.body, Attention, "blocks.0.attention.body", FAMILY)
    ffn = expect(second.body, GatedMLP, "blocks.0.ffn.body", FAMILY)
    norm = expect(spec.norm, LayerNorm, "norm", FAMILY)
    bare = spec.head is None
    written = {
        "architectures": [HEADS[1 if bare else 0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "hidden_activation": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "norm_eps": float(norm.eps),
        "norm_bias": norm.bias,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        **_write_layers(spec),
        **_write_head(spec),
    }
    kept = {key: value for key, value in carried.items() if key != "global_attn_every_n_layers"}
    config = config_of(written, kept, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_head(spec: Model) -> dict[str, Any]:
    head = spec.language_head
    if head is None:
        return {}
    transform = expect(head.transform, HeadTransform, "head.transform", FAMILY)
    return {
        "classifier_activation": WRITTEN_ACTIVATIONS.get(transform.activation, transform.activation),
        "classifier_bias": transform.bias,
        "decoder_bias": head.bias,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }


def _write_layers(spec: Model) -> dict[str, Any]:
    bodies = [body for block in spec.blocks for body in (block.branches[0].body,) if isinstance(body, Attention)]
    kinds = [FULL if body.window is None else SLIDING for body in bodies]
    rotaries = {kind: body.positions for kind, body in zip(kinds, bodies, strict=True)}
    rope = {}
    for kind, (_, usual) in THETAS.items():
        rotary = rotaries.get(kind)
        if not isinstance(rotary, Rotary):
            rotary = Rotary(d_rotary=2, theta=usual)
        older = write_rotary(rotary, spec.max_positions)
        rope[kind] = {"rope_theta": older["rope_theta"], **(older["rope_scaling"] or {"rope_type": "default"})}
    windows = [body.window for body in bodies if body.window is not None]
    return {
        "layer_types": kinds,
        "rope_parameters": rope,
        "local_attention": 2 * (windows[0] - 1) if windows else 128,
    }


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    prefix = "" if spec.head is None else "model."
    outside = {path: prefix + stem for path, stem in OUTSIDE.items()}
    entries = outside_entries(spec, outside | HEAD, FAMILY)
    inside = tuple(path for paths in FUSED.values() for path in paths)
    for i, block in enumerate(spec.blocks):
        place, stored = f"blocks.{i}.", f"{prefix}layers.{i}."
        shapes = {name: weight.shape for name, weight, _ in weights(block)}
        for stem, parts in FUSED.items():
            for kind in ("weight", "bias"):
                names = [f"{part}.{kind}" for part in parts if f"{part}.{kind}" in shapes]
                if names:
                    layout = Concat(tuple(shapes[name][0] for name in names))
                    paths = tuple(place + name for name in names)
                    entries.append(Entry(paths=paths, names=(f"{stored}{stem}.{kind}",), layout=layout))
        entries += named_entries(block, place, STEMS, stored, {}, FAMILY, elsewhere=inside)
    duplicates = {"decoder.weight": "embedding.weight"} if isinstance(spec.head, TiedHead) else {}
    ignored = {r"(head|decoder)\..*": "the head, which ModernBertModel leaves aside"} if spec.head is None else {}
    return Table(entries=tuple(entries), ignored=ignored, duplicates=duplicates)
