"""deberta-v2: distances beyond four tokens share rows of their table, or those beyond the table do; a convolution."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from encoders import ENCODER
from harness import TOKENS, ParityCase
from transformers import DebertaV2Config, PreTrainedConfig

from cases import bert


def draw(rng: Random, name: str = "DebertaV2ForMaskedLM", **more: object) -> PreTrainedConfig:
    """A config like v3's; `more` overrides."""
    v3: dict[str, Any] = {
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": rng.choice([8, 10]),
        "max_relative_positions": rng.choice([20, TOKENS]),
        "pos_att_type": "p2c|c2p",
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }
    return bert.draw(rng, DebertaV2Config, name, TOKENS, **v3 | more)


CASE = ParityCase(
    family="deberta-v2",
    kind=ENCODER,
    configs={
        "masked": draw,
        "keys": partial(draw, pos_att_type=["c2p"], position_buckets=-1, max_relative_positions=7, norm_rel_ebd="none"),
        "queries": partial(draw, name="DebertaV2Model", pos_att_type=["p2c"], position_biased_input=True),
        "absolute": partial(
            draw,
            name="DebertaV2ForTokenClassification",
            relative_attention=False,
            pos_att_type=None,
            norm_rel_ebd="none",
            position_biased_input=True,
            type_vocab_size=2,
        ),
        "convolved": partial(draw, conv_kernel_size=3, conv_act="gelu"),
        "wide": partial(
            draw, name="DebertaV2Model", conv_kernel_size=5, position_biased_input=True, norm_rel_ebd="none"
        ),
        "texts": partial(draw, name="DebertaV2ForSequenceClassification", num_labels=3),
    },
    inert_weights=bert.INERT,
    inert_in=("keys", "absolute"),  # elsewhere keys are multiplied with the queries of distances too
    attentions=("eager",),
)
