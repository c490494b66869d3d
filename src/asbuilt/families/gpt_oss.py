"""The gpt_oss family: sinks, windows on every second layer, and experts with biases and a clamped gate.

OpenAI 2025 (arXiv 2508.10925). The published weights of the experts are packed as mxfp4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import experts
from asbuilt.families.shared.common import read_layer_types
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Number, Only, Optional, Values, eps
from asbuilt.families.shared.names import ATTENTION, NORMS
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import FULL, SLIDING, sizes
from asbuilt.families.shared.table import Chain, EachExpert, Entry, Interleave, Layout, Mxfp4, Table, Transpose, entry
from asbuilt.spec import ClampedGate, MixtureOfExperts, Model, RMSNorm, Router

# what a config that says nothing of it means
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GATE = ClampedGate(alpha=1.702, limit=7.0)
STEMS = NORMS | ATTENTION | {"ffn.body.router": "mlp.router", "attention.body.sinks": "self_attn.sinks"}


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    windows: tuple[int | None, ...],
    alpha: float = GATE.alpha,
    limit: float = GATE.limit,
    eps: float = 1e-5,
    bias: bool = True,
) -> Model:
    """Returns the model of these dimensions, each layer with its own of the windows."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = replace(experts.mixture(dimensions, router), gating=ClampedGate(alpha=alpha, limit=limit), bias=True)
    plain = replace(dimensions.attention(bias=bias, output_bias=bias), sinks=True)
    return dimensions.model(tuple(pre_norm(replace(plain, window=window), ffn, norm) for window in windows), norm)


def _with_rope(config: dict[str, Any], name: str) -> dict[str, Any]:
    said = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling") or value}
    return said if "rope_parameters" in said or "rope_scaling" in said else said | {"rope_scaling": ROPE}


class _ScaledRope(Rope):
    """The rotary keys, where null would mean the published scaling."""

    def write(self, parts: Parts) -> dict[str, Any]:
        written = super().write(parts)
        return written | {"rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


class Windows:
    """Each layer's window; without `layer_types` the first layer has one, and every second after it."""

    key, default = "sliding_window", 128

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows."""
        Optional(self.key, "size", default=self.default).read(reader, own := {})
        reader.irrelevant(self.key, "told by the blocks, or without effect where no layer has a window")
        usual = tuple(FULL if i % 2 else SLIDING for i in range(values["dimensions"].n_layers))
        sliding = [kind == SLIDING for kind in read_layer_types(reader, usual)]
        reader.require(self.key, own["size"] is not None or not any(sliding), "a window, for the sliding layers")
        values["windows"] = tuple(own["size"] if slides else None for slides in sliding)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types, and the window; where no layer has one, as it was carried."""
        windows = [layer.window for layer in parts.attentions]
        size = next((one for one in windows if one is not None), parts.carried.get(self.key, self.default))
        return {self.key: size, "layer_types": [FULL if one is None else SLIDING for one in windows]}


def _gate(parts: Parts) -> ClampedGate:
    return parts.expect(parts.mixture.gating, ClampedGate, "blocks.0.ffn.body.gating")


def _table(spec: Model, family: str) -> Table:
    """Returns the names of a checkpoint folder's plain tensors: inputs first, gate and up column by column in turn."""

    def stored(part: MixtureOfExperts) -> list[Entry]:
        layout = EachExpert(Chain((_laced(part), Transpose())))
        return [
            Entry(paths=("gate", "up"), names=("mlp.experts.gate_up_proj",), layout=layout),
            Entry(paths=("down",), names=("mlp.experts.down_proj",), layout=EachExpert(Transpose())),
            *_biases(part),
        ]

    return experts.stacked_table(spec, STEMS, family, stored)


def _packed_table(spec: Model) -> Table:
    """Returns the names of a checkpoint folder's tensors, those of the experts packed, outputs first."""

    def stored(part: MixtureOfExperts) -> list[Entry]:
        layouts = {("gate", "up"): Chain((EachExpert(_laced(part)), Mxfp4())), ("down",): Mxfp4()}
        return [
            Entry(paths=paths, names=_packed_names(f"{'_'.join(paths)}_proj"), layout=layout, packed=True)
            for paths, layout in layouts.items()
        ] + _biases(part)

    return experts.stacked_table(spec, STEMS, "gpt_oss", stored)


def _packed_names(name: str) -> tuple[str, str]:
    return f"mlp.experts.{name}_blocks", f"mlp.experts.{name}_scales"


def _laced(part: MixtureOfExperts) -> Layout:
    return Interleave(part.d_ff, (1, 1))


def _biases(part: MixtureOfExperts) -> list[Entry]:
    inward = EachExpert(_laced(part))
    return [
        Entry(paths=("gate_bias", "up_bias"), names=("mlp.experts.gate_up_proj_bias",), layout=inward),
        entry("down_bias", "mlp.experts.down_proj_bias"),
    ]


FAMILY = Family(
    name="gpt_oss",
    heads=("GptOssForCausalLM",),
    prepare=_with_rope,
    keys=(  # defaults as in transformers' GptOssConfig
        Only("hidden_act", "silu", reason="the experts of this family open by a widened silu"),
        sizes(
            n_vocab=201088,
            d_model=2880,
            d_ff=2880,
            n_layers=36,
            n_heads=64,
            n_kv_heads=8,
            d_head=64,
            context=131072,
            but={"rotary": _ScaledRope(theta=150000.0)},
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("num_local_experts", "num_experts", n_experts=128, top_k=4), renormalise=True, bias=True
        ),
        Only(
            "experts_per_token",
            lambda values: values["router"].top_k,
            reason="another spelling of num_experts_per_tok, which is read",
        ),
        Windows(),
        Number("swiglu_alpha", "alpha", default=GATE.alpha, at=lambda parts: _gate(parts).alpha),
        Number("swiglu_limit", "limit", default=GATE.limit, at=lambda parts: _gate(parts).limit),
        eps("rms_norm_eps", 1e-5),
        Flag("attention_bias", "bias", default=True),
        Irrelevant("told by the rotary parameters", "initial_context_length"),
    ),
    build=build,
    names=_table,
    packed={"mxfp4": _packed_table},
)
