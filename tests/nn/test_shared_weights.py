"""Transformers beside the stream, whose weights several depths use: what is held once, and what each use has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import strategies
import torch

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.plan.devices import device
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import precision
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LanguageModel,
    Pass,
    RMSNorm,
    Rotary,
    SharedTransformer,
    SideTransformer,
    TokenEmbedding,
    weights,
)

WIDTH, TOKENS = 8, 9
SHARED = SharedTransformer(
    norm=RMSNorm(d=2 * WIDTH),
    attention=Attention(
        d_model=WIDTH, d_input=2 * WIDTH, n_heads=2, n_kv_heads=1, d_head=4, positions=Rotary(d_rotary=4)
    ),
    ffn_norm=RMSNorm(d=WIDTH),
    ffn=GatedMLP(d_model=WIDTH, d_ff=12, activation="gelu"),
)
LENT, BORROWED = replace(SHARED, weights_name="early"), replace(SHARED, weights_from="early")


def block(shared: SharedTransformer, rank: int | None = 3) -> Block:
    body = MLP(d_model=WIDTH, d_ff=9, activation="relu")
    side = SideTransformer(shared=shared, rank=rank, attention_rank=rank and 2)
    return Block(branches=(Branch(name="x", norm=RMSNorm(d=WIDTH), body=body, side=side),))


def model(*blocks: Block) -> LanguageModel:
    table: dict[str, Any] = {"n_vocab": 11, "d_model": WIDTH}
    return LanguageModel(embedding=TokenEmbedding(**table), blocks=blocks, head=Head(**table), max_positions=64)


TIED = model(block(LENT), block(BORROWED), block(BORROWED, None))
APART = model(block(SHARED), block(SHARED), block(SHARED, None))
IDS = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % 11


def pair() -> tuple[Model, Model]:
    """A model that shares and one that does not, with equal weights at every use."""
    tied, apart = (strategies.randomised(spec, 0, torch.float64) for spec in (TIED, APART))
    held = dict(tied.named_parameters())
    with torch.no_grad():
        for path, parameter in apart.named_parameters():
            owner, _, name = path.rpartition(".")
            parameter.copy_(held[f"{TIED.holders.get(owner, owner)}.{name}"])
    return tied, apart


def test_sharing_changes_no_output_and_sums_gradients() -> None:
    tied, apart = pair()
    a, b = tied(IDS), apart(IDS)
    assert torch.allclose(a, b, rtol=0, atol=1e-12)
    for logits in (a, b):
        logits.square().sum().backward()
    own = [dict(apart.named_parameters())[f"blocks.{i}.x.side.shared.attention.q.weight"].grad for i in range(3)]
    shared = dict(tied.named_parameters())["blocks.0.x.side.shared.attention.q.weight"].grad
    assert shared is not None
    added = torch.stack([grad for grad in own if grad is not None]).sum(0)
    assert torch.allclose(shared, added, rtol=1e-10, atol=1e-10)


def test_each_use_has_a_cache_of_its_own() -> None:
    tied, _ = pair()
    with torch.inference_mode():
        whole, cache = tied(IDS), Cache(TIED, batch=2, capacity=TOKENS, dtype=torch.float64)
        steps = [tied(IDS[:, i : i + 1], cache=cache) for i in range(TOKENS)]
    assert torch.allclose(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)
    assert len(cache.layers) == 3
    assert cost.cache(TIED, TOKENS, "fp32") == cost.cache(APART, TOKENS, "fp32")


def test_weights_are_held_once_and_read_for_each_use() -> None:
    size = sum(weight.size for path, weight, _ in weights(APART) if path.startswith("blocks.1.x.side.shared."))
    assert cost.total_parameters(TIED) == cost.total_parameters(APART) - 2 * size
    assert cost.active_parameters(TIED) == cost.total_parameters(TIED)
    for run in (Pass(tokens=5), Pass(tokens=1, past=4)):
        assert cost.flops(TIED, run) == cost.flops(APART, run)
        assert cost.saved(TIED, run) == cost.saved(APART, run)
        assert cost.moved(TIED, run, "bf16", "bf16") == cost.moved(APART, run, "bf16", "bf16")
    rows = cost.rows(TIED, Pass(tokens=8), "bf16")
    assert sum(row.parameters * row.count for row in rows) == cost.total_parameters(TIED)


@pytest.mark.parametrize("pp", [1, 3])
def test_a_stage_holds_what_its_blocks_use(pp: int) -> None:
    """One GPU holds shared weights once; of stages each holds its own copy."""
    held = device(TIED, Placement(pp=pp), precision("fp32")).stages
    total = sum(stage.folds.total_bytes * stage.stage.count for stage in held)
    assert total == 4 * cost.total_parameters(TIED if pp == 1 else APART)


REFUSED: dict[str, tuple[Block, ...]] = {
    "no lender": (block(BORROWED),),
    "a later lender": (block(BORROWED), block(LENT)),
    "an unlike lender": (block(LENT), block(replace(BORROWED, ffn_norm=None))),
    "two of a name": (block(LENT), block(LENT), block(BORROWED)),
    "nobody who borrows": (block(LENT),),
}


@pytest.mark.parametrize("blocks", REFUSED.values(), ids=REFUSED)
def test_who_lends_and_borrows_must_agree(blocks: tuple[Block, ...]) -> None:
    with pytest.raises(InputError, match=r"LanguageModel\.blocks"):
        model(*blocks)


def test_a_transformer_beside_the_stream_reads_twice_its_width() -> None:
    with pytest.raises(InputError, match=r"SharedTransformer\.attention"):
        replace(SHARED, attention=replace(SHARED.attention, d_input=None))
    with pytest.raises(InputError, match=r"Branch\.body"):
        Branch(name="x", body=SHARED.attention)
    with pytest.raises(InputError, match=r"SharedTransformer\.weights_name"):
        replace(LENT, weights_from="early")
