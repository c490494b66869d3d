"""The llama4_text family: chunked attention with RoPE, every fourth layer without positions, and a shared expert.

Meta 2025, the Llama 4 model card and published code. A token's expert reads the token times its score, a sigmoid.
Layers with RoPE norm queries and keys without gains (after RoPE, which is the same); the others scale their queries by
a temperature that grows with the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared import experts
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Size, Values, but, eps
from asbuilt.families.shared.names import ATTENTION, NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import ATTENTION_BIAS, CHUNKED, HeadWidth, LayerWindows, RopeLayers, sizes
from asbuilt.families.shared.table import Chain, Concat, EachExpert, Entry, Transpose, entry
from asbuilt.spec import LanguageModel, MixtureOfExperts, QueryTemperature, RMSNorm, Rotary, Router

INTERVAL, CHUNK, WIDE = 4, 8192, 16384
TEMPERATURE = QueryTemperature(scale=0.1, floor=8192)
STEMS = NORMS | ATTENTION | {"ffn.body.router": "feed_forward.router"}
STEMS |= {f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
STEMS |= {f"ffn.body.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def build(
    router: Router,
    *,
    rope_layers: Sequence[bool],
    chunks: Sequence[int | None],
    sparse: Sequence[bool],
    d_dense: int = WIDE,
    eps: float = 1e-5,
    bias: bool = False,
    head_norms: bool = True,
    temperature: QueryTemperature | None = TEMPERATURE,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes: for each layer whether it has RoPE, its chunk, and whether it has experts.

    Layers without experts are `d_dense` wide; `head_norms` are those of layers with RoPE, `temperature` of the others.
    """
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps)
    per_head = RMSNorm(d=made.head_width, eps=eps, gain="none") if head_norms else None
    # the order matters where a scaling multiplies cosines and sines
    last = head_norms and made.rotary is not None and made.rotary.attention_factor != 1.0
    own: dict[bool, dict[str, Any]] = {
        True: {"adjacent": True, "q_norm": per_head, "k_norm": per_head, "rotate_first": last},
        False: {"rope": False, "temperature": temperature},
    }
    ffns = {
        True: replace(made.mixture(router), weighs="inputs", shared=made.gated()),
        False: replace(made.gated(), d_ff=d_dense),
    }
    blocks = (
        pre_norm(made.attention(bias=bias, output_bias=bias, chunk=chunk, **own[rope]), ffns[mixed], norm)
        for rope, chunk, mixed in zip(rope_layers, chunks, sparse, strict=True)
    )
    return made.model(tuple(blocks), norm)


class Sparse:
    """Which layers have experts: those in `moe_layers`; without it the last of every so many."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers."""
        n_layers, step_key, key = values["n_layers"], "interleave_moe_layer_step", "moe_layers"
        step = reader.size(step_key, default=1)
        reader.overruled(step_key, key)
        reader.irrelevant(step_key, f"{key}, as it is written, says it")
        listed = reader.given(key)
        said = reader.config[key] if listed else [i for i in range(n_layers) if (i + 1) % step == 0]
        reader.require(key, isinstance(said, list) and all(is_whole(x) for x in said), "a list of layers")
        values["sparse"] = tuple(i in set(said) for i in range(n_layers))
        reader.require(key if listed else step_key, any(values["sparse"]), "such that some layer has experts")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {"moe_layers": [i for i, _ in experts.sparse_layers(parts.model)]}


class Temperature:
    """The temperature of the queries of layers without positions."""

    tuned, scale, floor = "attn_temperature_tuning", "attn_scale", "floor_scale"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the temperature; the first release's configs say 4 for true."""
        scale = reader.number(self.scale, default=TEMPERATURE.scale)
        floor = reader.size(self.floor, default=TEMPERATURE.floor)
        counted = is_whole(reader.config.get(self.tuned))
        tuned = reader.size(self.tuned, least=0) > 0 if counted else reader.flag(self.tuned, default=True)
        for key in (self.tuned, self.scale, self.floor):
            reader.irrelevant(key, "without effect where every layer has RoPE, or no temperature")
        values["temperature"] = QueryTemperature(scale=scale, floor=floor) if tuned else None

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; those that have no effect stay as they were carried."""
        plain = [layer for layer in parts.attentions if layer.positions is None]
        if not plain:
            return {}
        found = plain[0].temperature
        written = {} if found is None else {self.scale: float(found.scale), self.floor: found.floor}
        return {self.tuned: found is not None} | written


class HeadNorms(Flag):
    """Whether layers with RoPE norm queries and keys; without such layers it stays as it was carried."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the flag."""
        with_rope = [layer for layer in parts.attentions if isinstance(layer.positions, Rotary)]
        return {self.key: with_rope[0].q_norm is not None} if with_rope else {}


def _stacked(part: MixtureOfExperts) -> list[Entry]:
    """Returns the entries of the experts: in stacks, inputs first, gates before ups."""
    inward = EachExpert(Chain((Concat((part.d_ff, part.d_ff)), Transpose())))
    return [
        Entry(paths=("gate", "up"), names=("feed_forward.experts.gate_up_proj",), layout=inward),
        entry("down", "feed_forward.experts.down_proj", EachExpert(Transpose())),
    ]


FAMILY = Family(
    name="llama4_text",
    heads=("Llama4ForCausalLM",),
    ends=lambda name: decoder_ends("Llama4Text"),
    keys=(  # defaults as in transformers' Llama4TextConfig
        *but(
            sizes(n_vocab=202048, d_model=5120, d_ff=8192, n_layers=48, n_heads=40, n_kv_heads=8, context=131072),
            d_head=HeadWidth(128),
            rotary={"theta": 500000.0},
            d_ff={"at": "mixture.d_ff"},
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_local_experts", n_experts=16, top_k=1), renormalise=False, scoring="sigmoid"
        ),
        RopeLayers(interval=INTERVAL, empty_too=True),
        # the layers with RoPE are chunked, unless `layer_types` says
        LayerWindows(
            key="attention_chunk_size", kind=CHUNKED, default=CHUNK, usual=lambda _, values: values["rope_layers"]
        ),
        Sparse(),
        experts.dense(Size("intermediate_size_mlp", "d_dense", default=WIDE)),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        HeadNorms("use_qk_norm", "head_norms", default=True),
        Temperature(),
        Irrelevant("how a tool lays out the experts", "for_llm_compressor"),
    ),
    build=build,
    names=Names(stems=STEMS, stacked=_stacked),
)
