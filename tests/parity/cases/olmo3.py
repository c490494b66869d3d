"""olmo3: windows in three of four layers or as listed, YaRN for full attention alone, biases or none."""

from __future__ import annotations

from functools import partial
from random import Random

from drawn import WINDOW, YARN, draw
from harness import Draw, ParityCase
from transformers import Olmo3Config, PreTrainedConfig

LISTED = ["sliding_attention", "full_attention", "sliding_attention"]


def layered(rng: Random, *, stretched: bool = False, **more: object) -> PreTrainedConfig:
    """Each kind of layer with a base of its own, and where `stretched` YaRN for full attention."""
    kinds = ("full_attention", "sliding_attention")
    ropes = {kind: {"rope_type": "default", "rope_theta": rng.uniform(50, 200)} for kind in kinds}
    if stretched:
        ropes["full_attention"] |= YARN | {"factor": rng.uniform(2, 6)}
    return draw(rng, Olmo3Config, "rms_norm_eps", sliding_window=WINDOW, rope_parameters=ropes, **more)


CONFIGS: dict[str, Draw] = {
    "usual_tied": partial(layered, num_hidden_layers=4, tie_word_embeddings=True),
    "listed_biased": partial(
        layered, stretched=True, num_hidden_layers=3, layer_types=LISTED, attention_bias=True, tie_word_embeddings=False
    ),
}

CASE = ParityCase(family="olmo3", configs=CONFIGS)
