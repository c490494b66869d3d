"""falcon_mamba: as mamba, with norms whose epsilon matters."""

from __future__ import annotations

from functools import partial

from harness import Draw, ParityCase
from transformers import FalconMambaConfig

from cases.mamba import OfStack, draw

NORMED = partial(draw, kind=FalconMambaConfig, mixer_rms_eps=0.2)
CONFIGS: dict[str, Draw] = {
    "tied": partial(NORMED, tie_word_embeddings=True),
    "untied": partial(NORMED, tie_word_embeddings=False, use_bias=True, time_step_rank=3),
}

CASE = ParityCase(family="falcon_mamba", configs=CONFIGS, kind=OfStack(), attentions=("eager",))
