"""The gpt_oss family: sinks, windows on every second layer, and experts with biases and a clamped gate.

OpenAI 2025 (arXiv 2508.10925). The published weights of the experts are packed as mxfp4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared import experts
from asbuilt.families.shared.common import config_of, read_common, read_layer_types, require_same
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Chain, EachExpert, Entry, Interleave, Layout, Mxfp4, Table, Transpose, entry
from asbuilt.spec import ClampedGate, MixtureOfExperts, Model, RMSNorm, Router

FAMILY = "gpt_oss"
HEADS = ("GptOssForCausalLM",)
# of transformers' GptOssConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 150000.0,
}
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
STEMS = shared.NORM_STEMS | shared.ATTENTION_STEMS | {"ffn.body.router": "mlp.router"}
STEMS |= {"attention.body.sinks": "self_attn.sinks"}


def build(
    dimensions: Dimensions,
    router: Router,
    *,
    windows: tuple[int | None, ...],
    gating: ClampedGate = GATE,
    eps: float = 1e-5,
    bias: bool = True,
) -> Model:
    """Returns the model of these dimensions, each layer with its own of the windows."""
    norm = RMSNorm(d=dimensions.d_model, eps=eps)
    ffn = replace(experts.mixture(dimensions, router), gating=gating, bias=True)
    plain = replace(dimensions.attention(bias=bias, output_bias=bias), sinks=True)
    return dimensions.model(
        tuple(shared.pre_norm(replace(plain, window=window), ffn, norm) for window in windows), norm
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    said = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling") or value}
    rope = {} if "rope_parameters" in said or "rope_scaling" in said else {"rope_scaling": ROPE}
    reader = ConfigReader(said | rope, name)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("initial_context_length", "told by the rotary parameters")
    reader.only("hidden_act", "silu", reason="the experts of this family open by a widened silu")
    dimensions = shared.read_dimensions(reader, DEFAULTS)
    router = experts.read_router(
        reader,
        dimensions.d_model,
        dimensions.n_layers,
        ("num_local_experts", "num_experts"),
        n_experts=128,
        top_k=4,
        renormalise=True,
    )
    reader.only("experts_per_token", router.top_k, reason="another spelling of num_experts_per_tok, which is read")
    spec = build(
        dimensions,
        replace(router, bias=True),
        windows=_read_windows(reader, dimensions.n_layers),
        gating=ClampedGate(
            alpha=reader.number("swiglu_alpha", default=GATE.alpha),
            limit=reader.number("swiglu_limit", default=GATE.limit),
        ),
        eps=reader.number("rms_norm_eps", default=1e-5, most=1.0),
        bias=reader.flag("attention_bias", default=True),
    )
    reader.finish()
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_windows(reader: ConfigReader, n_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window; without `layer_types` the first layer has one, and every second after it."""
    window = shared.read_window(reader, 128)
    reader.irrelevant("sliding_window", "told by the blocks, or without effect where no layer has a window")
    usual = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(n_layers))
    sliding = [kind == "sliding_attention" for kind in read_layer_types(reader, usual)]
    reader.require("sliding_window", window is not None or not any(sliding), "a window, for the sliding layers")
    return tuple(window if slides else None for slides in sliding)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn = shared.first_parts(spec, FAMILY, MixtureOfExperts)
    if not isinstance(ffn.gating, ClampedGate):
        raise shared.wrong_part(FAMILY, "blocks.0.ffn.body.gating", None, ClampedGate)
    windows = [layer.window for layer in shared.attentions(spec)]
    written = {
        **shared.write_dimensions(spec, FAMILY, HEADS[0], ffn),
        "num_local_experts": ffn.n_experts,
        "num_experts_per_tok": ffn.top_k,
        "swiglu_alpha": float(ffn.gating.alpha),
        "swiglu_limit": float(ffn.gating.limit),
        "sliding_window": next((w for w in windows if w is not None), carried.get("sliding_window", 128)),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "rms_norm_eps": float(shared.final_norm(spec, FAMILY, RMSNorm).eps),
        "attention_bias": attention.bias,
    }
    if written["rope_scaling"] is None:
        written["rope_scaling"] = {"rope_type": "default"}  # null would mean YaRN
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names of a checkpoint folder's plain tensors: inputs first, gate and up column by column in turn."""

    def stored(part: MixtureOfExperts) -> list[Entry]:
        layout = EachExpert(Chain((_laced(part), Transpose())))
        return [
            Entry(paths=("gate", "up"), names=("mlp.experts.gate_up_proj",), layout=layout),
            Entry(paths=("down",), names=("mlp.experts.down_proj",), layout=EachExpert(Transpose())),
            *_biases(part),
        ]

    return experts.stacked_table(spec, STEMS, FAMILY, stored)


def _packed_table(spec: Model) -> Table:
    """Returns the names of a checkpoint folder's tensors, those of the experts packed, outputs first."""

    def stored(part: MixtureOfExperts) -> list[Entry]:
        layouts = {("gate", "up"): Chain((EachExpert(_laced(part)), Mxfp4())), ("down",): Mxfp4()}
        return [
            Entry(paths=paths, names=_packed_names(f"{'_'.join(paths)}_proj"), layout=layout, packed=True)
            for paths, layout in layouts.items()
        ] + _biases(part)

    return experts.stacked_table(spec, STEMS, FAMILY, stored)


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


PACKED = {"mxfp4": _packed_table}
