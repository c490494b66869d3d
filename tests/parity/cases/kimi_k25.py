"""kimi_k25: squares of four and of nine patches, tables larger and smaller than images, beside latent attention."""

from __future__ import annotations

from functools import partial
from random import Random

from harness import Draw, ParityCase
from seeing_rows import SeeingRows
from torch import Tensor
from transformers import DeepseekV3Config, Kimi_K25Config
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

from asbuilt.families.kimi_k25 import SAVED_AGAIN
from cases.deepseek_v3 import GROUPS, OPEN, latent


def config(rng: Random, merge: int, **more: object) -> Kimi_K25Config:
    """A config of a small tower and a small text; `more` overrides the text's."""
    text = latent(rng, DeepseekV3Config, **more)
    heads, side = rng.choice([2, 3]), rng.choice([4, 7, 12])
    images = Kimi_K25VisionConfig(
        patch_size=rng.randrange(2, 4),
        pos_emb_height=side,
        pos_emb_width=side,
        num_attention_heads=heads,
        num_hidden_layers=3,
        hidden_size=heads * rng.choice([8, 12]),
        intermediate_size=rng.randrange(20, 40),
        hidden_act=rng.choice(["gelu_pytorch_tanh", "relu"]),
        merge_kernel_size=[merge, merge],
        rope_parameters={"rope_type": "axial", "rope_theta": rng.uniform(5.0, 50.0)},
    )
    return Kimi_K25Config(
        text_config=text,
        vision_config=images,
        projection_hidden_size=images.hidden_size,
        projection_layer_norm_eps=rng.choice([1e-5, 1e-2]),
        image_token_id=0,  # read without an image every one is looked up as 0
        tie_word_embeddings=text.tie_word_embeddings,
    )


class Seeing(SeeingRows):
    """Published folders have other names than transformers saves; without ranks of queries those would be mixed up."""

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors under the names of the hub."""
        back = {saved: hub for hub, saved in SAVED_AGAIN}
        begins = {name: next((saved for saved in back if name.startswith(saved)), "") for name in tensors}
        return {back.get(saved, "") + name.removeprefix(saved): tensors[name] for name, saved in begins.items()}


CONFIGS: dict[str, Draw] = {
    "fours_tied": partial(config, merge=2, tie_word_embeddings=True, **OPEN),
    "nines": partial(config, merge=3, n_shared_experts=2, tie_word_embeddings=False, **GROUPS),
}

COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
CASE = ParityCase(family="kimi_k25", configs=CONFIGS, kind=Seeing(), inert_fields=COSTS)
