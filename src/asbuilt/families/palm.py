"""PaLM: parallel blocks with one norm, one key/value head, SwiGLU, no biases (Chowdhery et al. 2022, arXiv 2204.02311).

No weights were published, so there are no names of tensors: a config of this form is described, costed and built.
"""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.common import MOST_LAYERS, config_of, read_common, require_same
from asbuilt.families.fused import expect
from asbuilt.families.reader import ConfigReader, Reading
from asbuilt.families.table import Table
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LayerNorm,
    Model,
    Parallel,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "palm"


def build(*, n_vocab: int, d_model: int, n_layers: int, n_heads: int, d_head: int, d_ff: int, max_positions: int,
          n_kv_heads: int = 1, tied: bool = True, name: str = FAMILY) -> Model:  # fmt: skip
    """Returns the model of these dimensions; a tied head's logits are scaled by d_model^-0.5 (the paper, section 5)."""
    attention = Attention(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head,
                          positions=Rotary(d_rotary=d_head))  # fmt: skip
    ffn = GatedMLP(d_model=d_model, d_ff=d_ff, activation="silu")
    norm = LayerNorm(d=d_model, bias=False)
    block = Block(branches=(Branch(name="both", norm=norm, body=Parallel(attention=attention, ffn=ffn)),))
    return Model(
        name=name,
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(block,) * n_layers,
        norm=norm,
        head=TiedHead(d_model=d_model, n_vocab=n_vocab, scale=d_model**-0.5)
        if tied
        else Head(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this form says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, ())
    reader.only("bias", False, reason="this family has no biases")
    reader.only("parallel_block", True, reason="attention and feed-forward read the same norm in this family")
    reader.only("hidden_act", "swiglu", reason="this family has SwiGLU")
    d_head = reader.size("head_dim")
    reader.require("head_dim", d_head % 2 == 0, "an even number: rotary positions turn pairs")
    n_heads, kv_heads = reader.size("num_attention_heads"), reader.size("num_key_value_heads", default=1)
    reader.require("num_key_value_heads", n_heads % kv_heads == 0, f"a divisor of num_attention_heads = {n_heads}")
    spec = build(
        n_vocab=reader.size("vocab_size"),
        d_model=reader.size("hidden_size"),
        n_layers=reader.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        d_head=d_head,
        d_ff=reader.size("intermediate_size"),
        max_positions=reader.size("max_position_embeddings", default=2048),
        tied=reader.flag("tie_word_embeddings", default=True),
        name=name,
    )
    reader.finish()
    return Reading(spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    both = expect(spec.blocks[0].branches[0].body, Parallel, "blocks.0", FAMILY)
    attention = expect(both.attention, Attention, "blocks.0.both.body.attention", FAMILY)
    ffn = expect(both.ffn, GatedMLP, "blocks.0.both.body.ffn", FAMILY)
    written = {
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "intermediate_size": ffn.d_ff,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Raises InputError: there are no checkpoints of this family."""
    raise InputError("no checkpoints of this family were published, so its tensors have no names", field="family",
                     value=FAMILY, fix="write the spec as JSON")  # fmt: skip
