"""minimax: lightning attention in some layers, a window in the others, factors on stream and branches, short blocks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from drawn import D_HEAD, WINDOW, yarn
from drawn import draw as llama_like
from harness import COMPUTED, Draw, Kind, ParityCase
from torch import Tensor
from transformers import MiniMaxConfig, PreTrainedConfig
from transformers.models.minimax.modeling_minimax import MiniMaxPreTrainedModel

FACTORS = [f"{kind}_{end}_factor" for kind in ("linear_attn", "full_attn", "mlp") for end in ("alpha", "beta")]
# of three layers, since heads of the last one forget next to nothing
SIZES: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2, "block_size": 16, "num_hidden_layers": 3}


class Computing(Kind):
    """Its class stores decays that it computes from the config; where a file has none it computes them."""

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """All but those decays."""
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401
        usual = MiniMaxPreTrainedModel._keys_to_ignore_on_load_missing
        MiniMaxPreTrainedModel._keys_to_ignore_on_load_missing = [r"slope_rate$", r"_decay$"]
        try:
            return super().load(folder, **settings)
        finally:
            MiniMaxPreTrainedModel._keys_to_ignore_on_load_missing = usual


def draw(rng: Random, like: Any = llama_like, **more: object) -> PreTrainedConfig:  # noqa: ANN401
    """A llama-like config with experts, and factors that differ."""
    factors = {name: rng.uniform(0.5, 1.5) for name in FACTORS}
    made: PreTrainedConfig = like(rng, MiniMaxConfig, **{**SIZES, **factors, **more})
    return made


CONFIGS: dict[str, Draw] = {
    "tied": partial(draw, tie_word_embeddings=True, sliding_window=WINDOW),
    "untied": partial(
        draw,
        tie_word_embeddings=False,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        block_size=256,
    ),
    "wide": partial(draw, like=yarn, head_dim=D_HEAD, hidden_size=40, num_experts_per_tok=3),
}

CASE = ParityCase(family="minimax", configs=CONFIGS, kind=Computing())
