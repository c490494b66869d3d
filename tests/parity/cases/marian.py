"""marian: computed sinusoids, one embedding for all or one for each side."""

from __future__ import annotations

from random import Random

from harness import ParityCase
from transformers import MarianConfig, PreTrainedConfig
from translating import TRANSLATING

from cases.bart import INERT, both, draw

LONGER = {
    "positions.n_positions": "a longer table computes the same",
    "encoder.positions.n_positions": "a longer table computes the same",
}


def apart(rng: Random) -> PreTrainedConfig:
    """A vocabulary for each side."""
    return draw(rng, MarianConfig, share_encoder_decoder_embeddings=False, decoder_vocab_size=rng.randrange(101, 120))


CONFIGS = both(MarianConfig) | {"apart": apart}
CASE = ParityCase(
    family="marian",
    kind=TRANSLATING,
    configs=CONFIGS,
    inert_weights=INERT,
    inert_fields=LONGER,
)
