"""The starcoder2 family: LayerNorm, a feed-forward part of two matrices, biases everywhere, one window or none.

Lozhkov et al. 2024 (arXiv 2402.19173).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import MLP, LayerNorm, Model

FAMILY = "starcoder2"
HEADS = ("Starcoder2ForCausalLM",)
STEMS = shared.NORM_STEMS | shared.ATTENTION_STEMS | {"ffn.body.up": "mlp.c_fc", "ffn.body.down": "mlp.c_proj"}
# of transformers' Starcoder2Config
DEFAULTS: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def build(dimensions: Dimensions, *, eps: float = 1e-5, bias: bool = True, window: int | None = None) -> Model:
    """Returns the model of these dimensions; every layer has the window, every matrix but the head a bias if asked."""
    norm = LayerNorm(d=dimensions.d_model, eps=eps)
    attention = dimensions.attention(bias=bias, output_bias=bias, window=window)
    block = shared.pre_norm(attention, dimensions.plain(bias), norm)
    return dimensions.model((block,) * dimensions.n_layers, norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    for key in ("residual_dropout", "embedding_dropout"):
        reader.irrelevant(key, "training only")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "layer_norm_epsilon"):
        reader.irrelevant(key, "of the code this family grew from; norm_epsilon is what is read")
    reader.only("scale_attn_weights", True, reason="scores are always scaled in this family")
    # in the published configs; transformers no longer reads the two
    reader.only("mlp_type", "default", reason="only the plain feed-forward part is read in this family")
    reader.only("norm_type", "layer_norm", reason="only LayerNorm is read in this family")
    reader.only("layer_types", None, reason="all layers of this family are alike")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("norm_epsilon", default=1e-5, most=1.0)
    bias = reader.flag("use_bias", default=True)
    window = shared.read_window(reader, None)
    reader.finish()
    spec = build(dimensions, eps=eps, bias=bias, window=window)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, MLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "norm_epsilon": float(shared.final_norm(spec, FAMILY, LayerNorm).eps),
        "use_bias": attention.bias,
        "sliding_window": attention.window,
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, STEMS, FAMILY)
