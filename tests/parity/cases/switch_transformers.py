"""switch_transformers: experts in some layers and in all, which are too few for the text: some are full, some not."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import TOKENS, ParityCase
from transformers import PreTrainedConfig, SwitchTransformersConfig
from translating import TRANSLATING

from cases.t5 import PLAIN, draw

EXPERTS = 5
CAPACITY = TOKENS // EXPERTS - 1  # below the mean: one expert at least is full


def sparse(rng: Random, **more: object) -> PreTrainedConfig:
    """An encoder whose second layer has experts, and a decoder in which every layer has."""
    activation = rng.choice(PLAIN)
    return draw(
        rng,
        kind=SwitchTransformersConfig,
        dense_act_fn=activation,
        num_experts=EXPERTS,
        expert_capacity=CAPACITY,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        **more,
    )


CASE = ParityCase(
    family="switch_transformers",
    kind=TRANSLATING,
    configs={"plain": sparse, "biased": partial(sparse, router_bias=True)},
    attentions=("eager",),  # the only one that transformers has of it
)
