"""xlm-roberta: roberta under another name."""

from __future__ import annotations

from functools import partial

from encoders import ENCODER
from harness import ParityCase
from transformers import XLMRobertaConfig

from cases import bert, roberta

CASE = ParityCase(
    family="xlm-roberta",
    kind=ENCODER,
    configs={
        "masked": partial(roberta.draw, kind=XLMRobertaConfig, name="XLMRobertaForMaskedLM"),
        "pooled": partial(roberta.draw, kind=XLMRobertaConfig, name="XLMRobertaModel"),
    },
    inert_weights=bert.INERT,
)
