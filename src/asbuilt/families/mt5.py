"""The mt5 family: t5 as of version 1.1, gated, its head never scaled. Xue et al. 2021 (arXiv 2010.11934)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import t5
from asbuilt.families.shared.key import Carried, Size, tied

FAMILY = replace(
    t5.FAMILY,
    name="mt5",
    heads=("MT5ForConditionalGeneration",),
    keys=(  # defaults as in transformers' MT5Config
        t5.size_keys(n_vocab=250112, d_model=512, n_heads=6),
        *t5.layer_keys(8),
        Size("d_ff", "d_ff", default=1024),
        t5.GatedOrPlain("gated-gelu"),
        tied(True),
        Carried("decoder_start_token_id", 0),
    ),
    build=partial(t5.build, scaled=False),
)
