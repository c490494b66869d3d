"""PaLM: parallel blocks with one norm, one key/value head, SwiGLU, no biases (Chowdhery et al. 2022, arXiv 2204.02311).

No weights were published, so there are no names of tensors: a config of this form is described, costed and built.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.papers import no_tensors, read_sizes, write_sizes
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
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


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_head: int,
    d_ff: int,
    max_positions: int,
    n_kv_heads: int = 1,
    tied: bool = True,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; a tied head's logits are scaled by d_model^-0.5 (the paper, section 5)."""
    attention = Attention(
        d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, positions=Rotary(d_rotary=d_head)
    )
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
    sizes = read_sizes(reader)
    reader.require("head_dim", sizes["d_head"] % 2 == 0, "an even number: rotary positions turn pairs")
    n_heads, kv_heads = sizes["n_heads"], reader.size("num_key_value_heads", default=1)
    reader.require("num_key_value_heads", n_heads % kv_heads == 0, f"a divisor of num_attention_heads = {n_heads}")
    spec = build(**sizes, n_kv_heads=kv_heads)
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    both = expect(spec.blocks[0].branches[0].body, Parallel, "blocks.0", FAMILY)
    attention = expect(both.attention, Attention, "blocks.0.both.body.attention", FAMILY)
    ffn = expect(both.ffn, GatedMLP, "blocks.0.both.body.ffn", FAMILY)
    written = write_sizes(spec, FAMILY, attention, ffn) | {"num_key_value_heads": attention.n_kv_heads}
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Raises InputError: there are no checkpoints of this family."""
    raise no_tensors(FAMILY)
