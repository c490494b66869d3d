"""The mt5 family: t5 as of version 1.1, gated, its head never scaled. Xue et al. 2021 (arXiv 2010.11934)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import t5
from asbuilt.families.shared.key import Carried, defaults, tied

FAMILY = replace(
    t5.FAMILY,
    name="mt5",
    heads=("MT5ForConditionalGeneration",),
    keys=(  # defaults as in transformers' MT5Config
        *defaults(t5.KEYS, n_vocab=250112, n_heads=6, n_layers=8, d_ff=1024),
        t5.GatedOrPlain("gated-gelu"),
        tied(True),
        Carried("decoder_start_token_id", 0),
    ),
    build=partial(t5.build, scaled=False),
)
