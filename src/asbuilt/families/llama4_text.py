"""The llama4_text family: rotary layers in chunks, every fourth without positions, and experts beside a shared one.

Meta 2025, the Llama 4 model card and published code. A token's expert reads the token times its score, a sigmoid.
Layers that turn normalise queries and keys without gains (after turning them, which is the same); the others warm
their queries with the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, read_layer_types, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading, is_whole
from asbuilt.families.shared.table import Chain, Concat, EachExpert, Entry, Table, Transpose
from asbuilt.spec import (
    Attention,
    GatedMLP,
    MixtureOfExperts,
    Model,
    QueryTemperature,
    RMSNorm,
    Rotary,
    Router,
)

FAMILY = "llama4_text"
HEADS = ("Llama4ForCausalLM",)
# of transformers' Llama4TextConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096 * 32,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
INTERVAL, CHUNK, WIDE = 4, 8192, 16384
TEMPERATURE = QueryTemperature(scale=0.1, floor=8192)
KINDS = ("full_attention", "chunked_attention")
STEMS = shared.NORM_STEMS | shared.ATTENTION_STEMS | {"ffn.body.router": "feed_forward.router"}
STEMS |= {f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
STEMS |= {f"ffn.body.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def every_fourth(n_layers: int, interval: int = INTERVAL) -> tuple[bool, ...]:
    """Returns which layers turn: all but each interval's last."""
    return tuple((i + 1) % interval != 0 for i in range(n_layers))


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    turned: Sequence[bool],
    chunks: Sequence[int | None],
    sparse: Sequence[bool],
    d_dense: int = WIDE,
    eps: float = 1e-5,
    bias: bool = False,
    head_norms: bool = True,
    temperature: QueryTemperature | None = TEMPERATURE,
) -> Model:
    """Returns the model of these dimensions: for each layer whether it turns, its chunk, and whether it has experts.

    Layers without experts are `d_dense` wide; `head_norms` are those of layers that turn, `temperature` of the others.
    """
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    of_head = RMSNorm(d=dimensions.head_width, eps=eps, gain="none") if head_norms else None
    turns = replace(
        dimensions.attention(bias=bias, output_bias=bias, q_norm=of_head, k_norm=of_head),
        positions=replace(dimensions.rotary, pairing="adjacent"),
    )
    plain = replace(dimensions.attention(turned=False, bias=bias, output_bias=bias), temperature=temperature)
    mixture = replace(experts.mixture(dimensions, router), weighs="inputs", shared=dimensions.gated())
    dense = replace(dimensions.gated(), d_ff=d_dense)
    blocks = (
        shared.pre_norm(replace(turns if turning else plain, chunk=chunk), mixture if mixed else dense, norm)
        for turning, chunk, mixed in zip(turned, chunks, sparse, strict=True)
    )
    return dimensions.model(tuple(blocks), norm)


def read(config: dict[str, Any], name: str, prefix: str = "") -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    reader = ConfigReader(config, name, prefix)
    dtype = read_common(reader, FAMILY, HEADS)
    spec = read_spec(reader)
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def read_spec(reader: ConfigReader) -> Model:
    """Returns the model of a text config, what every config may carry having been read."""
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    layers = dimensions.n_layers
    router = experts.read_router(
        reader, dimensions.d_model, layers, ("num_local_experts",), n_experts=16, top_k=1, renormalise=False
    )
    reader.irrelevant("intermediate_size_mlp", "of the dense layers, where there are any")
    reader.irrelevant("for_llm_compressor", "how a tool lays out the experts")
    turned = _read_turned(reader, layers)
    return build(
        dimensions,
        replace(router, scoring="sigmoid"),
        turned=turned,
        chunks=_read_chunks(reader, turned),
        sparse=_read_sparse(reader, layers),
        d_dense=reader.size("intermediate_size_mlp", default=WIDE),
        eps=reader.number("rms_norm_eps", default=1e-5, most=1.0),
        bias=reader.flag("attention_bias", default=False),
        head_norms=reader.flag("use_qk_norm", default=True),
        temperature=_read_temperature(reader),
    )


def _read_turned(reader: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    """Returns which layers turn: `no_rope_layers` has a 1 for those; empty means all but each interval's last."""
    interval = reader.size("no_rope_layer_interval", default=INTERVAL)
    reader.overruled("no_rope_layer_interval", "no_rope_layers")
    reader.irrelevant("no_rope_layer_interval", "told by no_rope_layers as it is written")
    said = reader.config["no_rope_layers"] if reader.given("no_rope_layers") else []
    ok = isinstance(said, list) and all(is_whole(x) and x in (0, 1) for x in said)
    allowed = f"a list of at least {n_layers} of 1 (rotary positions) and 0 (none)"
    reader.require("no_rope_layers", ok and (not said or len(said) >= n_layers), allowed)
    return tuple(x == 1 for x in said[:n_layers]) if said else every_fourth(n_layers, interval)


def _read_chunks(reader: ConfigReader, turned: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Returns each layer's chunk; without `layer_types` the layers that turn have one."""
    null = "attention_chunk_size" in reader.config and not reader.given("attention_chunk_size")
    chunk = None if null else reader.size("attention_chunk_size", default=CHUNK)
    reader.irrelevant("attention_chunk_size", "told by the blocks, or without effect where no layer is chunked")
    usual = tuple(KINDS[turning and chunk is not None] for turning in turned)
    chunked = [kind == KINDS[1] for kind in read_layer_types(reader, usual, KINDS)]
    reader.require("attention_chunk_size", chunk is not None or not any(chunked), "a size, for the chunked layers")
    return tuple(chunk if one else None for one in chunked)


def _read_sparse(reader: ConfigReader, n_layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts: those in `moe_layers`; without it the last of every so many."""
    step = reader.size("interleave_moe_layer_step", default=1)
    reader.overruled("interleave_moe_layer_step", "moe_layers")
    reader.irrelevant("interleave_moe_layer_step", "told by moe_layers as it is written")
    usual = [i for i in range(n_layers) if (i + 1) % step == 0]
    said = reader.config["moe_layers"] if reader.given("moe_layers") else usual
    ok = isinstance(said, list) and all(is_whole(x) for x in said)
    reader.require("moe_layers", ok, "a list of layers")
    sparse = tuple(i in set(said) for i in range(n_layers))
    reader.require(
        "moe_layers" if reader.given("moe_layers") else "interleave_moe_layer_step",
        any(sparse),
        "such that some layer has experts",
    )
    return sparse


def _read_temperature(reader: ConfigReader) -> QueryTemperature | None:
    scale, floor = reader.number("attn_scale", default=TEMPERATURE.scale), reader.size("floor_scale", default=8192)
    for key in ("attn_scale", "floor_scale"):
        reader.irrelevant(key, "without effect where every layer turns, or none is warmed")
    key = "attn_temperature_tuning"
    counted = is_whole(reader.config.get(key))  # the first release's configs say 4 for true
    tuned = reader.size(key, least=0) > 0 if counted else reader.flag(key, default=True)
    reader.irrelevant(key, "without effect where every layer turns")
    return QueryTemperature(scale=scale, floor=floor) if tuned else None


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    layers = shared.attentions(spec)
    ffn = experts.first_mixture(spec, FAMILY)
    dense = next((body for block in spec.blocks if isinstance(body := block.branches[-1].body, GatedMLP)), None)
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "num_local_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "intermediate_size_mlp": carried.get("intermediate_size_mlp", WIDE) if dense is None else dense.d_ff,
        "moe_layers": [i for i, _ in experts.sparse_layers(spec)],
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        **_write_attention(layers, carried),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def _write_attention(layers: list[Attention], carried: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of attention; those that have no effect as they were carried."""
    turning = [layer for layer in layers if isinstance(layer.positions, Rotary)]
    plain = [layer for layer in layers if layer.positions is None]
    chunk = next(
        (layer.chunk for layer in layers if layer.chunk is not None), carried.get("attention_chunk_size", CHUNK)
    )
    written: dict[str, Any] = {
        "attention_bias": any(layer.bias for layer in layers),
        "no_rope_layers": [int(layer.positions is not None) for layer in layers],
        "layer_types": [KINDS[layer.chunk is not None] for layer in layers],
        "attention_chunk_size": chunk,
    }
    if turning:
        written["use_qk_norm"] = turning[0].q_norm is not None
    if plain:
        warm = plain[0].temperature
        written["attn_temperature_tuning"] = warm is not None
        written |= {} if warm is None else {"attn_scale": float(warm.scale), "floor_scale": warm.floor}
    return written


def table(spec: Model) -> Table:
    """Returns the names of a checkpoint folder's tensors: experts stacked, inputs first, gates before ups."""

    def stored(part: MixtureOfExperts) -> list[Entry]:
        inward = EachExpert(Chain((Concat((part.d_ff, part.d_ff)), Transpose())))
        return [
            Entry(paths=("gate", "up"), names=("feed_forward.experts.gate_up_proj",), layout=inward),
            Entry(paths=("down",), names=("feed_forward.experts.down_proj",), layout=EachExpert(Transpose())),
        ]

    return experts.stacked_table(spec, STEMS, FAMILY, stored)
