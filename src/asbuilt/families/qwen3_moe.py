"""The qwen3_moe family: qwen3's attention, and experts in all layers but those that are told to be dense.

Yang et al. 2025 (arXiv 2505.09388). Layer i has experts where i + 1 is a multiple of `decoder_sparse_step` and i is not
in `mlp_only_layers`; dense layers are `intermediate_size` wide, experts `moe_intermediate_size`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.qwen3 import read_usual_attention
from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading, is_whole
from asbuilt.families.shared.table import Table
from asbuilt.spec import GatedMLP, Model, RMSNorm, Router

FAMILY = "qwen3_moe"
HEADS = ("Qwen3MoeForCausalLM",)
# of transformers' Qwen3MoeConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
STEMS = shared.STEMS | shared.QK_NORM_STEMS | {"ffn.body.router": "mlp.gate"}
EXPERTS = {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
PATTERN = ("decoder_sparse_step", "mlp_only_layers")
WINDOW = ("use_sliding_window", "sliding_window")


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    d_expert: int,
    dense: frozenset[int] = frozenset(),
    eps: float = 1e-6,
    bias: bool = False,
    window: int | None = None,
) -> Model:
    """Returns the model of these dimensions, experts `d_expert` wide in all layers that are not `dense`."""
    norm, of_head = RMSNorm(d=dimensions.d_model, eps=eps), RMSNorm(d=dimensions.rotary.d_rotary, eps=eps)
    attention = dimensions.attention(bias=bias, output_bias=bias, q_norm=of_head, k_norm=of_head, window=window)
    sparse = shared.pre_norm(attention, experts.mixture(dimensions, router, d_expert), norm)
    full = shared.pre_norm(attention, dimensions.gated(), norm)
    return dimensions.model(tuple(full if i in dense else sparse for i in range(dimensions.n_layers)), norm)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    reader.only("shared_expert_intermediate_size", 0, None, reason="this family has no shared expert")
    reader.only("num_shared_experts", 0, None, reason="this family has no shared expert")
    reader.irrelevant("intermediate_size", "of the dense layers, where there are any")
    router = experts.read_router(
        reader,
        dimensions.d_model,
        dimensions.n_layers,
        ("num_experts", "num_local_experts"),
        n_experts=128,
        top_k=8,
        renormalise=reader.flag("norm_topk_prob", default=False),
    )
    d_expert = reader.size("moe_intermediate_size", default=768)
    eps = reader.number("rms_norm_eps", default=1e-6, most=1.0)
    bias = reader.flag("attention_bias", default=False)
    read_usual_attention(reader, bias)
    dense = _read_dense(reader, dimensions.n_layers)
    window = _read_window(reader)
    reader.finish()
    spec = build(dimensions, router, d_expert=d_expert, dense=dense, eps=eps, bias=bias, window=window)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_dense(reader: ConfigReader, n_layers: int) -> frozenset[int]:
    """Returns the layers without experts; the keys are carried too, since several ways of saying it are the same."""
    step = reader.size("decoder_sparse_step", default=1)
    listed = reader.config["mlp_only_layers"] if reader.given("mlp_only_layers") else []
    reader.require("mlp_only_layers", isinstance(listed, list) and all(map(is_whole, listed)), "a list of layers")
    for key in PATTERN:
        reader.irrelevant(key, "told by the blocks")
    dense = _dense(step, listed, n_layers)
    reader.require("decoder_sparse_step", len(dense) < n_layers, "such that some layer has experts")
    return dense


def _dense(step: int, listed: list[int], n_layers: int) -> frozenset[int]:
    only = set(listed)
    return frozenset(i for i in range(n_layers) if i in only or (i + 1) % step)


def _read_window(reader: ConfigReader) -> int | None:
    """Returns the window of all layers, where `use_sliding_window` switches it on.

    `max_window_layers` once kept windows from the first layers, and now means nothing: beside a window it is refused.
    """
    size, used = shared.read_window(reader, 4096), reader.flag("use_sliding_window", default=False)
    for key in (*WINDOW, "max_window_layers"):
        reader.irrelevant(key, "told by the blocks, or without effect where there is no window")
    window = size if used else None
    if window is not None:
        reader.only("max_window_layers", 0, reason="versions of this family differ in which layers it gives windows")
    return window


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    ffn = experts.first_mixture(spec, FAMILY)
    attention = shared.attentions(spec)[0] if shared.attentions(spec) else None
    bodies = [block.branches[-1].body for block in spec.blocks]
    dense = {i: body for i, body in enumerate(bodies) if isinstance(body, GatedMLP)}
    d_ff = next((body.d_ff for body in dense.values()), carried.get("intermediate_size", DEFAULTS["intermediate_size"]))
    window = None if attention is None else attention.window
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], replace(ffn, d_ff=d_ff)),
        "moe_intermediate_size": ffn.d_ff,
        "num_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "norm_topk_prob": ffn.router.renormalise,
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention is not None and attention.bias,
        **_write_dense(frozenset(dense), spec.n_layers, carried),
        **_write_window(window, carried),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_dense(dense: frozenset[int], n_layers: int, carried: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that tell the dense layers: those carried, where they still tell the same."""
    step, listed = (carried.get(key) for key in PATTERN)
    if _dense(step or 1, listed or [], n_layers) == dense:
        return {key: carried[key] for key in PATTERN if key in carried}
    return dict(zip(PATTERN, (1, sorted(dense)), strict=True))


def _write_window(window: int | None, carried: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that tell the window; of a model without one those that were carried, if they switch none on."""
    if window is not None:
        return dict(zip(WINDOW, (True, window), strict=True))
    if carried.get("use_sliding_window") and carried.get("sliding_window", 4096) is not None:
        return {"use_sliding_window": False}
    return {key: carried[key] for key in WINDOW if key in carried}


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, as on the hub: one matrix for each expert."""
    return experts.table(spec, STEMS, EXPERTS, FAMILY)
