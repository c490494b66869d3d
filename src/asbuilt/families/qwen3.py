"""The qwen3 family: llama's blocks with an RMSNorm over each head's query and key, and qwen2's windows.

Yang et al. 2025 (arXiv 2505.09388). Heads are 128 wide whatever hidden_size / num_attention_heads is.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from asbuilt.families.qwen2 import read_windows, write_windows
from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm

FAMILY = "qwen3"
HEADS = ("Qwen3ForCausalLM",)
DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}  # of transformers' Qwen3Config
STEMS = shared.STEMS | shared.QK_NORM_STEMS


def build(
    dimensions: Dimensions, *, eps: float = 1e-6, bias: bool = False, windows: tuple[int | None, ...] = ()
) -> Model:
    """Returns the model of these dimensions; `windows` has one for each layer, or is empty where none has any."""
    norm, of_head = RMSNorm(d=dimensions.d_model, eps=eps), RMSNorm(d=dimensions.rotary.d_rotary, eps=eps)
    ffn = dimensions.gated()
    attentions = [
        dimensions.attention(bias=bias, output_bias=bias, q_norm=of_head, k_norm=of_head, window=w)
        for w in windows or (None,) * dimensions.n_layers
    ]
    return dimensions.model(tuple(shared.pre_norm(attention, ffn, norm) for attention in attentions), norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    eps = reader.number("rms_norm_eps", default=1e-6, most=1.0)
    bias = reader.flag("attention_bias", default=False)
    read_usual_attention(reader, bias)
    windows = read_windows(reader, dimensions.n_layers)
    reader.finish()
    spec = build(dimensions, eps=eps, bias=bias, windows=windows)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def read_usual_attention(reader: ConfigReader, bias: bool) -> None:
    """Reads the keys that say again what the family always is, or that only other programs read."""
    reader.only("qkv_bias", bias, reason="what attention_bias says")
    reader.only("use_qk_norm", True, reason="each head's queries and keys are normed in this family")
    shared.read_chunked(reader)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, GatedMLP)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
        **write_windows(spec, carried),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return shared.table(spec, STEMS, FAMILY)
