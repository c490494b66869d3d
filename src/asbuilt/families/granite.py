"""The granite family: llama's blocks, with factors on the embedding, the scores, every branch and the logits.

Granite 3 (IBM 2024); the factors keep one learning rate good at all widths: Shen et al. 2024 (arXiv 2408.13359).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import LARGEST_NUMBER, ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm, TokenEmbedding

FAMILY = "granite"
HEADS = ("GraniteForCausalLM",)
# of transformers' GraniteConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def build(
    dimensions: Dimensions,
    *,
    eps: float = 1e-6,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    embedding_scale: float = 1.0,
    score_scale: float = 1.0,
    branch_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Model:
    """Returns the model of these dimensions; `score_scale` stands in place of d_head^-0.5."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    attention = dimensions.attention(bias=attention_bias, output_bias=attention_bias, scale=score_scale)
    block = shared.pre_norm(attention, dimensions.gated(mlp_bias), norm, branch_scale)
    blocks = (block,) * dimensions.n_layers
    return dimensions.model(blocks, norm, embedding_scale=embedding_scale, logit_scale=logit_scale)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    spec = build(
        dimensions,
        eps=reader.number("rms_norm_eps", default=1e-6, most=1.0),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        embedding_scale=reader.number("embedding_multiplier", default=1.0),
        score_scale=reader.number("attention_multiplier", default=1.0),
        branch_scale=reader.number("residual_multiplier", default=1.0),
        # logits are divided by it
        logit_scale=1 / reader.number("logits_scaling", default=1.0, above=1 / LARGEST_NUMBER),
    )
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    if not isinstance(spec.embedding, TokenEmbedding):
        raise shared.wrong_part(FAMILY, "embedding", spec.embedding, TokenEmbedding)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "embedding_multiplier": float(spec.embedding.scale),
        "attention_multiplier": float(attention.d_head**-0.5 if attention.scale is None else attention.scale),
        "residual_multiplier": float(spec.blocks[0].branches[0].scale),
        "logits_scaling": _divisor(1.0 if spec.language_head is None else spec.language_head.scale),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _divisor(scale: float) -> float:
    """Returns the shortest number whose reciprocal is `scale`."""
    decimals = (float(f"{1 / scale:.{digits}g}") for digits in range(1, 18))
    return next((x for x in decimals if 1 / x == scale), 1 / scale)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, shared.STEMS, FAMILY)
