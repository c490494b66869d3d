"""The gpt2 family: learned positions, LayerNorm before each branch, one fused q, k, v matrix stored (in, out).

Radford et al. 2019; GPT-3 (arXiv 2005.14165) is read through the same class where its sparse layers are left out.
"""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    divide,
    named_entries,
    read_common,
    require_same,
)
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Chain, Concat, Entry, Layout, Table, Transpose, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    LearnedPositions,
    Model,
    Part,
    TiedHead,
    TokenEmbedding,
)
from asbuilt.spec.part import LARGEST_SIZE

FAMILY = "gpt2"
HEADS = ("GPT2LMHeadModel",)
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
PREFIX = "transformer."

OUTSIDE = {
    "embedding.weight": "wte.weight",
    "positions.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
STEMS = {
    "attention.norm": "ln_1",
    "attention.body.o": "attn.c_proj",
    "ffn.norm": "ln_2",
    "ffn.body.up": "mlp.c_fc",
    "ffn.body.down": "mlp.c_proj",
}
TRANSPOSED = ("attention.body.o", "ffn.body.up", "ffn.body.down")
FUSED = tuple(f"attention.body.{part}" for part in "qkv")


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    max_positions: int,
    n_positions: int | None = None,
    d_ff: int | None = None,
    eps: float = 1e-5,
    activation: Activation = "gelu_tanh",
    scale_by_width: bool = True,
    scale_by_layer: bool = False,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_ff None means 4 * d_model, n_positions None max_positions.

    Scores are multiplied by d_head^-0.5 if `scale_by_width`, and divided by the layer's number, counted from 1, if
    `scale_by_layer`.
    """
    norm = LayerNorm(d=d_model, eps=eps)
    d_head = d_model // n_heads
    ffn = MLP(d_model=d_model, d_ff=d_ff or 4 * d_model, activation=activation, bias=True)

    def block(scale: float) -> Block:
        attention = Attention(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_head,
            bias=True,
            output_bias=True,
            scale=None if scale == d_head**-0.5 else scale,
        )
        branches = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
        return Block(branches=branches)

    base = d_head**-0.5 if scale_by_width else 1.0
    by_layer = tuple(block(base / (i + 1)) for i in range(n_layers)) if scale_by_layer else ()
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        positions=LearnedPositions(n_positions=n_positions or max_positions, d_model=d_model),
        blocks=by_layer or (block(base),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' GPT2Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"):
        reader.irrelevant(f"summary_{key}", "describes a classifier, and the head here is the language model's")
    reader.only("n_special", 0, reason="rows for special tokens beside the vocabulary are not read")
    reader.irrelevant("predict_special_tokens", "the head covers the vocabulary, and there are no others")
    reader.irrelevant("reorder_and_upcast_attn", "the same scores, computed in float32 and another order")
    d_model = reader.size("n_embd", "hidden_size", default=768, most=LARGEST_SIZE // 4)  # d_ff is 4 times that
    n_heads = reader.size("n_head", "num_attention_heads", default=12)
    n_positions = reader.size("n_positions", "max_position_embeddings", default=1024)
    context = reader.size("n_ctx", default=n_positions)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=50257),
        "n_layers": reader.size("n_layer", "num_hidden_layers", default=12, most=MOST_LAYERS),
        "d_ff": reader.size("n_inner", default=4 * d_model, null=4 * d_model),
        "eps": reader.number("layer_norm_epsilon", default=1e-5, most=1.0),
        "activation": reader.choice("activation_function", choices=ACTIVATION_NAMES, default="gelu_new"),
        "scale_by_width": reader.flag("scale_attn_weights", default=True),
        "scale_by_layer": reader.flag("scale_attn_by_inverse_layer_idx", default=False),
        "tied": reader.flag("tie_word_embeddings", default=True),
    }
    reader.finish()
    reader.require("n_ctx", context <= n_positions, f"at most n_positions = {n_positions}")
    key = reader.spelled("n_head", "num_attention_heads") or "n_head"
    divide(reader, d_model, "n_embd", n_heads, key)
    spec = build(d_model=d_model, n_heads=n_heads, n_positions=n_positions, max_positions=context, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _first(spec: Model) -> tuple[Attention, MLP, LayerNorm, LearnedPositions]:
    """Returns the parts of the first block; raises InputError naming the place where the spec is no gpt2."""
    named = {branch.name: branch for branch in spec.blocks[0].branches}
    attention, ffn = named.get("attention"), named.get("ffn")
    if len(named) != 2 or attention is None or ffn is None:
        raise InputError(f"{FAMILY} has two branches", field="blocks.0", value=list(named), allowed="attention, ffn")
    body, mlp, norm, positions = attention.body, ffn.body, attention.norm, spec.positions
    if not isinstance(body, Attention):
        raise _wrong("blocks.0.attention.body", body, Attention)
    if not isinstance(mlp, MLP):
        raise _wrong("blocks.0.ffn.body", mlp, MLP)
    if not isinstance(norm, LayerNorm):
        raise _wrong("blocks.0.attention.norm", norm, LayerNorm)
    if not isinstance(positions, LearnedPositions):
        raise _wrong("positions", positions, LearnedPositions)
    return body, mlp, norm, positions


def _wrong(path: str, value: Part | None, kind: type[Part]) -> InputError:
    return InputError(f"{FAMILY} has {kind.__name__} here", field=path, value=repr(value))


def _scales(spec: Model) -> tuple[bool, bool]:
    """Returns (scale_attn_weights, scale_attn_by_inverse_layer_idx) as the first and last layers tell them."""
    ends = []
    for i in (0, spec.n_layers - 1):
        bodies = [branch.body for branch in spec.blocks[i].branches]
        body = next((body for body in bodies if isinstance(body, Attention)), None)
        if body is None:
            raise _wrong(f"blocks.{i}.attention.body", bodies[0], Attention)
        ends.append((body.d_head**-0.5, body.d_head**-0.5 if body.scale is None else body.scale))
    (usual, first), (_, last) = ends
    return first == usual, last != first


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn, norm, positions = _first(spec)
    by_width, by_layer = _scales(spec)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "n_positions": positions.n_positions,
        "n_ctx": spec.max_positions,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": attention.n_heads,
        "n_inner": None if ffn.d_ff == 4 * spec.d_model else ffn.d_ff,
        "activation_function": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "layer_norm_epsilon": float(norm.eps),
        "scale_attn_weights": by_width,
        "scale_attn_by_inverse_layer_idx": by_layer,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    tied = isinstance(spec.head, TiedHead)
    return Table(
        entries=tuple(_entries(spec)) + (() if tied else (entry("head.weight", "lm_head.weight"),)),
        ignored={r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)": "the causal mask, stored as a buffer"},
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )


def _concat(spec: Model) -> Concat:
    attention, *_ = _first(spec)
    return Concat((attention.d_query, attention.d_kv, attention.d_kv))


def _entries(spec: Model) -> list[Entry]:
    """Returns the entries of all but the head: what stands outside the blocks, then each block with q, k, v as one."""
    entries = [entry(path, PREFIX + name) for path, name in OUTSIDE.items()]
    transposed: dict[str, Layout] = dict.fromkeys(TRANSPOSED, Transpose())
    fused = Chain((_concat(spec), Transpose()))
    for i, block in enumerate(spec.blocks):
        path, prefix = f"blocks.{i}.", f"{PREFIX}h.{i}."
        for kind in ("weight", "bias"):
            paths = tuple(f"{path}{stem}.{kind}" for stem in FUSED)
            entries.append(Entry(paths=paths, names=(f"{prefix}attn.c_attn.{kind}",), layout=fused))
        entries += named_entries(block, path, STEMS, prefix, transposed, FAMILY, elsewhere=FUSED)
    return entries
