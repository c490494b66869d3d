"""The gemma family: a scaled embedding, RMSNorm with 1 + weight, heads as wide as they please, a tied head.

Gemma Team 2024 (arXiv 2403.08295). Gemma 2 and 3 add norms after each branch, windows and more, and share what is here.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table, entry
from asbuilt.spec import (
    Activation,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    Model,
    Part,
    RMSNorm,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "gemma"
HEADS = ("GemmaForCausalLM",)


# without norms after the branches
STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.q": "self_attn.q_proj",
    "attention.body.k": "self_attn.k_proj",
    "attention.body.v": "self_attn.v_proj",
    "attention.body.o": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.gate": "mlp.gate_proj",
    "ffn.body.up": "mlp.up_proj",
    "ffn.body.down": "mlp.down_proj",
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    d_ff: int,
    max_positions: int,
    layers: Sequence[tuple[Rotary, int | None]],
    eps: float = 1e-6,
    activation: Activation = "gelu_tanh",
    bias: bool = False,
    sandwich: bool = False,
    head_norms: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    logit_softcap: float | None = None,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions, with a rotation and a window (None for all tokens) for each layer.

    `sandwich` norms each branch's result too, `head_norms` each head's queries and keys. Scores are multiplied by
    `scale` (None for d_head^-0.5) and capped at `softcap`, logits at `logit_softcap`.
    """
    norm = RMSNorm(d=d_model, eps=eps, gain="offset")
    per_head = RMSNorm(d=d_head, eps=eps, gain="offset") if head_norms else None
    after = norm if sandwich else None
    ffn = Branch(
        name="ffn",
        norm=norm,
        body=GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation),
        post_norm=after,
    )

    def block(rotary: Rotary, window: int | None) -> Block:
        attention = Attention(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            positions=rotary,
            bias=bias,
            output_bias=bias,
            q_norm=per_head,
            k_norm=per_head,
            window=window,
            softcap=softcap,
            scale=None if scale == d_head**-0.5 else scale,
        )
        return Block(branches=(Branch(name="attention", norm=norm, body=attention, post_norm=after), ffn))

    kinds = {layer: block(*layer) for layer in set(layers)}
    return Model(
        # the root is rounded to the stream's dtype when it is applied
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model, scale=d_model**0.5),
        blocks=tuple(kinds[layer] for layer in layers),
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab, softcap=logit_softcap),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read_sizes(reader: ConfigReader, **defaults: int) -> dict[str, Any]:
    """Returns what every gemma's config says by the same keys, as `build` takes it; `defaults` by key."""
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=defaults["vocab_size"]),
        "d_model": reader.size("hidden_size", default=defaults["hidden_size"]),
        "n_heads": reader.size("num_attention_heads", default=defaults["num_attention_heads"]),
        "n_kv_heads": reader.size("num_key_value_heads", default=defaults["num_key_value_heads"]),
        "d_head": reader.size("head_dim", default=256),
        "d_ff": reader.size("intermediate_size", default=defaults["intermediate_size"]),
        "max_positions": reader.size("max_position_embeddings", default=defaults["max_position_embeddings"]),
        "eps": reader.number("rms_norm_eps", default=1e-6, most=1.0),
        "bias": reader.flag("attention_bias", default=False),
        "tied": reader.flag("tie_word_embeddings", default=True),
    }
    reader.only("use_bidirectional_attention", False, None, reason="only causal attention is read")
    reader.require("head_dim", sizes["d_head"] % 2 == 0, "an even number: rotary positions turn pairs")
    divide(reader, sizes["n_heads"], "num_attention_heads", sizes["n_kv_heads"], "num_key_value_heads")
    return sizes


def read_depth(reader: ConfigReader, default: int) -> int:
    """Returns the number of layers."""
    return reader.size("num_hidden_layers", default=default, most=MOST_LAYERS)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' GemmaConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    sizes = read_sizes(
        reader,
        vocab_size=256000,
        hidden_size=3072,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=24576,
        max_position_embeddings=8192,
    )
    depth = read_depth(reader, 28)
    rotary = read_rotary(reader, sizes["d_head"], sizes["max_positions"])
    activation = _activation(reader)
    reader.finish()
    spec = build(layers=((rotary, None),) * depth, activation=activation, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _activation(reader: ConfigReader) -> Activation:
    """Returns the activation; `gelu` in the first releases' files means its tanh form, which they were trained with."""
    legacy: dict[str, Activation] = {**ACTIVATION_NAMES, "gelu": "gelu_tanh"}
    activation = reader.choice("hidden_act", choices=legacy, default="gelu_pytorch_tanh")
    if reader.given("hidden_activation"):  # a later spelling, which some versions read and others do not
        same = reader.choice("hidden_activation", choices=legacy) == activation
        reader.require("hidden_activation", same, "the same as hidden_act")
    reader.irrelevant("hidden_activation", "says again what hidden_act says")
    return activation


def write_sizes(spec: Model, family: str, head: str) -> dict[str, Any]:
    """Returns what every gemma's config says by the same keys."""
    attention, ffn, norm = first_parts(spec, family)
    return {
        "architectures": [head],
        "model_type": family,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": float(norm.eps),
        "attention_bias": attention.bias,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }


def _wrong(family: str, path: str, value: Part | None, kind: type[Part]) -> InputError:
    return InputError(f"{family} has {kind.__name__} here", field=path, value=repr(value))


def first_parts(spec: Model, family: str) -> tuple[Attention, GatedMLP, RMSNorm]:
    """Returns the parts of the first block; raises InputError naming the place where the spec is no gemma."""
    named = {branch.name: branch for branch in spec.blocks[0].branches}
    if named.keys() != {"attention", "ffn"}:
        raise InputError(f"{family} has two branches", field="blocks.0", value=list(named), allowed="attention, ffn")
    body, norm, mlp = named["attention"].body, named["attention"].norm, named["ffn"].body
    if not isinstance(body, Attention):
        raise _wrong(family, "blocks.0.attention.body", body, Attention)
    if not isinstance(norm, RMSNorm):
        raise _wrong(family, "blocks.0.attention.norm", norm, RMSNorm)
    if not isinstance(mlp, GatedMLP):
        raise _wrong(family, "blocks.0.ffn.body", mlp, GatedMLP)
    return body, mlp, norm


def rotary_of(block: Block, i: int, family: str) -> Rotary:
    """Returns the rotation of a block, the `i`th; raises InputError where there is none."""
    body = block.branches[0].body
    positions = body.positions if isinstance(body, Attention) else None
    if not isinstance(positions, Rotary):
        raise _wrong(family, f"blocks.{i}.attention.body.positions", positions, Rotary)
    return positions


def window_of(block: Block) -> int | None:
    """Returns the window of a block, None where it has none."""
    body = block.branches[0].body
    return body.window if isinstance(body, Attention) else None


def written_activation(ffn: GatedMLP) -> str:
    """Returns the activation's name in a config."""
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(ffn.activation, ffn.activation)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    _, ffn, _ = first_parts(spec, FAMILY)
    written = write_sizes(spec, FAMILY, HEADS[0]) | {
        "hidden_act": written_activation(ffn),
        **write_rotary(rotary_of(spec.blocks[0], 0, FAMILY), spec.max_positions),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return table_of(spec, STEMS, FAMILY)


def table_of(spec: Model, stems: dict[str, str], family: str) -> Table:
    """Returns the names and layouts of a gemma's tensors, those inside a layer by `stems`."""
    tied = isinstance(spec.head, TiedHead)
    entries = [entry("embedding.weight", "model.embed_tokens.weight"), entry("norm.weight", "model.norm.weight")]
    if not tied:
        entries.append(entry("head.weight", "lm_head.weight"))
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", stems, f"model.layers.{i}.", {}, family)
    return Table(
        entries=tuple(entries),
        ignored={r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"},
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )
