"""A decoder to start from: each width is given once, and the result is a spec to edit."""

from __future__ import annotations

from asbuilt.errors import InputError
from asbuilt.spec.attention import Attention
from asbuilt.spec.block import Block, Branch
from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.feedforward import GatedMLP
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.language_model import LanguageModel
from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.part import LARGEST_SIZE, MOST_BLOCKS
from asbuilt.spec.positions import Rotary

MULTIPLE = 64  # d_ff is rounded up to a multiple of this, so that matrices divide into tiles


def decoder(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int | None = None,
    d_head: int | None = None,
    d_ff: int | None = None,
    n_vocab: int = 32000,
    max_positions: int = 2048,
    theta: float = 10000.0,
    eps: float = 1e-5,
    tied: bool = False,
    name: str = "decoder",
) -> LanguageModel:
    """Returns a Llama-style decoder (Touvron et al. 2023, arXiv 2302.13971, section 2.2).

    Pre-norm RMSNorm, RoPE of base `theta` on whole heads, causal attention, SwiGLU, no biases. `n_kv_heads` defaults to
    n_heads, `d_head` to d_model / n_heads, `d_ff` to 8/3 d_model rounded up to a multiple of 64, which has as many
    weights as a plain MLP of 4 d_model. A `tied` head uses the embedding's table. Raises InputError for inconsistent
    sizes.
    """
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads}
    for field, size in sizes.items():
        most = MOST_BLOCKS if field == "n_layers" else LARGEST_SIZE
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise InputError(field=field, value=size, allowed=f"a whole number from 1 to {most:,}")
    if d_head is None and d_model % n_heads:
        raise InputError(
            field="d_model", value=d_model, allowed=f"a multiple of n_heads = {n_heads}", fix="or give d_head"
        )
    norm = RMSNorm(d=d_model, eps=eps)
    width = d_model // n_heads if d_head is None else d_head
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        d_head=width,
        positions=Rotary(d_rotary=width, theta=theta),
    )
    inner = -(-8 * d_model // (3 * MULTIPLE)) * MULTIPLE if d_ff is None else d_ff
    ffn = GatedMLP(d_model=d_model, d_ff=inner, activation="silu")
    block = Block(
        branches=(Branch(name="attention", norm=norm, body=attention), Branch(name="ffn", norm=norm, body=ffn))
    )
    return LanguageModel(
        name=name,
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(block,) * n_layers,
        norm=norm,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
    )
