"""Documents of four unlike models, each figure worked out here from the papers' formulas or counted on the built model.

A product (a,b)x(b,c) is 2abc FLOPs; s tokens of each of b sequences; bf16 is two bytes. Saved bytes are counted by
autograd's hooks, a block's as what a second one adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import strategies
import torch

from asbuilt.checkpoint.source import Source
from asbuilt.description import bill
from asbuilt.families import Reading, read_config
from asbuilt.measure import run as measured
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LatentAttention,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    TiedHead,
    TokenEmbedding,
)

S, B, V, M = 5, 3, 11, 8
NORM = RMSNorm(d=M)


@dataclass(frozen=True, kw_only=True)
class Hand:
    """A model and what of its document is worked out by hand; `blocks` makes it again with so many blocks."""

    spec: Model
    active: int
    parameters: dict[str, int]
    products: int
    scores: Fraction
    causal: Fraction
    cache: dict[str, int]
    moved: dict[str, int]
    lookups: int = B * M * 2


def block(mixer: Any, ffn: Any) -> Block:  # noqa: ANN401  any body
    return Block(branches=(Branch(name="attention", body=mixer, norm=NORM), Branch(name="ffn", body=ffn, norm=NORM)))


def model(*blocks: Block, tied: bool = False) -> Model:
    return Model(
        name="toy",
        embedding=TokenEmbedding(n_vocab=V, d_model=M),
        blocks=blocks,
        norm=NORM,
        max_positions=16,
        head=(TiedHead if tied else Head)(d_model=M, n_vocab=V),
    )


def cached(
    per_token: int,
    *,
    unbounded: int | None = None,
    window: int = 0,
    at_seq: int | None = None,
    source: int = 0,
    expanded: int | None = None,
) -> dict[str, int]:
    at_seq = S * per_token if at_seq is None else at_seq
    return {
        "bytes_per_token": per_token,
        "bytes_per_token_unbounded": per_token if unbounded is None else unbounded,
        "window_bytes": window,
        "fixed_bytes": 0,
        "bytes_per_source_token": source,
        "bytes_at_seq": at_seq,
        "bytes_per_token_expanded": per_token if expanded is None else expanded,
        "bytes_at_seq_batch": B * at_seq,
    }


def sparse() -> Hand:
    """Two layers of 4 heads of 6 over 2 of keys, 4 experts of 10 and two of them for each token."""
    attention = Attention(d_model=M, n_heads=4, n_kv_heads=2, d_head=6, positions=Rotary(d_rotary=6))
    router = Router(d_model=M, n_experts=4, top_k=2)
    experts = MixtureOfExperts(d_model=M, d_ff=10, n_experts=4, activation="silu", router=router)
    own, each = M * 6 * (4 + 2 + 2) + 4 * 6 * M, 3 * M * 10
    return Hand(
        spec=model(*(block(attention, experts),) * 2),
        parameters={
            "embedding": V * M,
            "attention": 2 * own,
            "ffn": 2 * 4 * each,
            "router": 2 * 4 * M,
            "norm": 5 * M,
            "head": V * M,
        },
        active=2 * V * M + 2 * (own + 2 * each + 4 * M) + 5 * M,
        products=2 * (2 * (own + 2 * each + 4 * M) + V * M),
        scores=Fraction(2 * 4 * 24 * S),
        causal=Fraction(2 * 4 * 24 * (S + 1), 2),
        cache=cached(2 * 2 * 12 * 2),
        # three tokens hit 4 x (1 - 1/2^3) of the experts
        moved={
            "attention": 2 * own * 2,
            "ffn": 2 * 4 * each * 2 * 7 // 8,
            "router": 2 * 4 * M * 2,
            "norm": 5 * M * 2,
            "head": V * M * 2,
        },
    )


def windowed() -> Hand:
    """A layer that sees 4 tokens and one that sees all; the embedding's table is the head's."""
    layers = [Attention(d_model=M, n_heads=4, n_kv_heads=1, d_head=6, window=window) for window in (4, None)]
    own, ffn = M * 6 * (4 + 1 + 1) + 4 * 6 * M, 3 * M * 10
    pairs = (1 + 2 + 3 + 4 + 4) + (1 + 2 + 3 + 4 + 5)
    return Hand(
        spec=model(*(block(layer, GatedMLP(d_model=M, d_ff=10, activation="silu")) for layer in layers), tied=True),
        parameters={"embedding": V * M, "attention": 2 * own, "ffn": 2 * ffn, "norm": 5 * M},
        active=V * M + 2 * (own + ffn) + 5 * M,
        products=2 * (2 * (own + ffn) + V * M),
        scores=Fraction(2 * 4 * 24 * S),
        causal=Fraction(4 * 24 * pairs, S),
        cache=cached(2 * 12 * 2, unbounded=24, window=4 * 24, at_seq=24 * (4 + 5)),
        moved={"attention": 2 * own * 2, "ffn": 2 * ffn * 2, "norm": 5 * M * 2, "head": V * M * 2},
    )


def latent() -> Hand:
    """Queries through 7 numbers; keys and values of 3 heads, 4 + 2 and 5 wide, through latents of 6 (DeepSeek-V2)."""
    part = LatentAttention(
        d_model=M,
        n_heads=3,
        q_rank=7,
        kv_rank=6,
        d_nope=4,
        d_rope=2,
        d_value=5,
        positions=Rotary(d_rotary=2),
        q_norm=RMSNorm(d=7),
        kv_norm=RMSNorm(d=6),
    )
    own, ffn = M * 7 + 7 * 3 * 6 + M * (6 + 2) + 6 * 3 * (4 + 5) + 3 * 5 * M, 3 * M * 10
    return Hand(
        spec=model(*(block(part, GatedMLP(d_model=M, d_ff=10, activation="silu")),) * 2),
        parameters={
            "embedding": V * M,
            "attention": 2 * own,
            "ffn": 2 * ffn,
            "norm": 5 * M + 2 * (7 + 6),
            "head": V * M,
        },
        active=2 * V * M + 2 * (own + ffn + 7 + 6) + 5 * M,
        products=2 * (2 * (own + ffn) + V * M),
        scores=Fraction(2 * 2 * 3 * (6 + 5) * S),
        causal=Fraction(2 * 2 * 3 * (6 + 5) * (S + 1), 2),
        cache=cached(2 * (6 + 2) * 2, expanded=2 * 3 * (6 + 5) * 2),
        moved={"attention": 2 * own * 2, "ffn": 2 * ffn * 2, "norm": (5 * M + 26) * 2, "head": V * M * 2},
    )


def both_sides() -> Hand:
    """T5: 2 heads of 3, 32 buckets of distances a stack, one layer in the encoder and two in the decoder."""
    config = {
        "model_type": "t5",
        "d_model": M,
        "d_kv": 3,
        "num_heads": 2,
        "d_ff": 10,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "vocab_size": V,
        "n_positions": 16,
        "tie_word_embeddings": True,
    }
    own, ffn = 4 * M * 6, 2 * M * 10
    return Hand(
        spec=read_config(config, "toy").spec,
        parameters={
            "embedding": V * M,
            "attention": 5 * own + 2 * 32 * 2,
            "ffn": 3 * ffn,
            "norm": (2 + 1 + 2 * 3 + 1) * M,
        },
        active=V * M + 5 * own + 128 + 3 * ffn + 10 * M,
        products=2 * (5 * own + 3 * ffn + V * M),
        scores=Fraction(5 * 4 * 6 * S),
        causal=Fraction(3 * 4 * 6 * S) + Fraction(2 * 4 * 6 * (S + 1), 2),
        cache=cached(2 * 12 * 2, source=2 * 12 * 2, at_seq=S * 2 * 48),
        # a step runs the decoder alone, and of cross-attention queries and results, half of its weights
        moved={"attention": (2 * own + own + 64) * 2, "ffn": 2 * ffn * 2, "norm": 7 * M * 2, "head": V * M * 2},
    )


TOYS: list[Callable[[], Hand]] = [sparse, windowed, latent, both_sides]


def described(spec: Model) -> dict[str, Any]:
    source = Source(kind="spec", name="toy", reading=Reading(spec=spec, carried={}, dtype=None, family=""))
    return bill.describe(source, seq=S, batch=B, dtype="bf16", kv_dtype="bf16")


def kept(spec: Model) -> tuple[int, int]:
    return measured.saved_bytes(strategies.randomised(spec, 0, torch.bfloat16), S, B)


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_a_whole_document_by_hand(toy: Callable[[], Hand]) -> None:
    hand = toy()
    found = described(hand.spec)
    total = sum(hand.parameters.values())
    zeros = dict.fromkeys(("embedding", "attention", "ffn", "ssm", "norm", "router", "projector", "head", "other"), 0)
    assert found["parameters"] == {"total": total, "active": hand.active, **zeros, **hand.parameters}
    assert found["parameters_stored"] == total
    forward, causal = hand.products + hand.scores, hand.products + hand.causal
    flops = {
        "products_per_token": hand.products,
        "scores_per_token": hand.scores,
        "scores_per_token_causal": hand.causal,
        "forward_per_token": forward,
        "forward_per_token_causal": causal,
        "training_per_token": 3 * forward,
    }
    assert found["flops"] == {"seq": S, **{key: pytest.approx(float(value), rel=1e-12) for key, value in flops.items()}}
    assert len({float(value) for value in flops.values()}) == len(flops)  # none passes for another
    plain = {name: found["weight_bytes"][name] for name in ("fp32", "bf16", "fp8", "int8", "int4")}
    assert plain == {"fp32": 4 * total, "bf16": 2 * total, "fp8": total, "int8": total, "int4": (total + 1) // 2}
    assert found["cache"] == {"dtype": "bf16", **hand.cache}
    assert found["logits_bytes"] == B * S * V * 2
    decode = found["decode"]
    assert decode["weight_bytes"] == hand.moved
    assert (decode["lookup_bytes"], decode["cache_bytes"]) == (hand.lookups, B * hand.cache["bytes_at_seq"])
    assert decode["total_bytes"] == sum(hand.moved.values()) + hand.lookups + B * hand.cache["bytes_at_seq"]
    assert (decode["dtype"], decode["seq"], decode["batch"]) == ("bf16", S, B)
    assert (found["defaults"], found["notes"], found["quantization"], found["stored_bytes"]) == ({}, {}, None, None)


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_activations_as_autograd_counts_them(toy: Callable[[], Hand]) -> None:
    spec = toy().spec
    found = described(spec)["activations"]
    everything, loss = kept(spec)
    assert (found["dtype"], found["saved_bytes"], found["loss_bytes"]) == ("bf16", everything, loss)
    adds = []
    for one in dict.fromkeys(spec.blocks):  # blocks that are the same keep as much
        more = replace(spec, blocks=(*spec.blocks, one))
        adds.append((spec.blocks.count(one), kept(more)[0] - everything))
    if "source" not in spec.reads:
        assert found["largest_block_bytes"] == max(size for _, size in adds)
        inside = sum(count * size for count, size in adds)
        assert found["checkpointed_bytes"] == everything - inside + spec.n_layers * B * S * M * 2
    else:
        assert found["largest_block_bytes"] >= max(size for _, size in adds)
        assert found["checkpointed_bytes"] < everything
