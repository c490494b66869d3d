"""camembert: roberta under another name."""

from __future__ import annotations

from functools import partial

from encoders import ENCODER
from harness import ParityCase
from transformers import CamembertConfig

from cases import bert, roberta

CASE = ParityCase(
    family="camembert",
    kind=ENCODER,
    configs={
        "masked": partial(roberta.draw, kind=CamembertConfig, name="CamembertForMaskedLM"),
        "pooled": partial(roberta.draw, kind=CamembertConfig, name="CamembertModel"),
    },
    inert_weights=bert.INERT,
)
