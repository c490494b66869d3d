"""Each kind of model learns: four random sequences of 32 tokens by heart, below 0.1 nats, in 150 steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asbuilt import build, decoder
from asbuilt.families import gpt2, t5
from asbuilt.spec import (
    LanguageModel,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    Model,
    Part,
    RMSNorm,
    Rotary,
    Router,
)
from asbuilt.train.batch import Batch
from asbuilt.train.optimizer import optimizers
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.schedule import Schedule
from asbuilt.train.settings import CHECKPOINTING, Experts, Optimizer
from asbuilt.train.step import train_step

WIDTH, STEPS, VOCAB = 64, 150, 64
SIZES: dict[str, Any] = {"d_model": WIDTH, "n_heads": 4, "n_vocab": VOCAB, "max_positions": 32, "n_layers": 2}


def with_body(spec: LanguageModel, name: str, body: Part) -> LanguageModel:
    """The model with this body in every branch of the name."""
    blocks = tuple(
        replace(
            block,
            branches=tuple(replace(one, body=body) if one.name == name else one for one in block.branches),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def experts() -> MixtureOfExperts:
    router = Router(d_model=WIDTH, n_experts=4, top_k=2, renormalise=True, correction=True)
    return MixtureOfExperts(d_model=WIDTH, d_ff=64, n_experts=4, activation="silu", router=router)


def qk_norm() -> LanguageModel:
    plain = decoder(**SIZES)
    attention = plain.blocks[0].branches[0].body
    return with_body(plain, "attention", replace(attention, q_norm=RMSNorm(d=16), k_norm=RMSNorm(d=16)))  # type: ignore[call-arg]


LATENT = LatentAttention(
    d_model=WIDTH, n_heads=4, kv_rank=24, d_nope=8, d_rope=8, d_value=16, positions=Rotary(d_rotary=8)
)
MODELS: dict[str, Model] = {
    "gpt": gpt2.build(**SIZES),
    "qk-norm": qk_norm(),
    "experts": with_body(decoder(**SIZES), "ffn", experts()),
    "t5": t5.build(n_decoder_layers=2, **SIZES),
    "latent": with_body(decoder(**SIZES), "attention", LATENT),
    "linear": with_body(decoder(**SIZES), "attention", LinearAttention(d_model=WIDTH, n_heads=4, d_head=16)),
}


def learnt(spec: Model) -> Batch:
    """Four random sequences; of an encoder-decoder, four random sources and what they stand for."""
    ids: Tensor = torch.randint(VOCAB, (4, 33))
    source = torch.randint(VOCAB, (4, 8)) if "source" in spec.reads else None
    return Batch(ids=ids[:, :-1], targets=ids[:, 1:], source=source)


@pytest.mark.parametrize("name", MODELS)
def test_four_sequences_are_memorised(name: str) -> None:
    spec = MODELS[name]
    model, batch = build(spec, seed=random.randrange(2**31)), learnt(spec)
    recompute_blocks(model, random.choice(CHECKPOINTING))
    made, schedule = optimizers(model, Optimizer(lr=1e-2, weight_decay=0.0)), Schedule(warmup=10)
    balanced = Experts(auxiliary=0.01, z_loss=1e-4, bias_rate=1e-3) if name == "experts" else Experts()
    steps = [
        train_step(model, [batch], made, factor=schedule.factor(step, STEPS), clip=1.0, rows=50, experts=balanced)
        for step in range(STEPS)
    ]
    assert steps[-1].loss < 0.1
    assert (steps[-1].fullest is None) == (name != "experts")
