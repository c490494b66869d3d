"""The switch_transformers family: t5 whose feed-forwards are, every so many layers, experts of which a token takes one.

Fedus et al. 2021 (arXiv 2101.03961). An expert takes so many tokens of a sequence and pass; what comes after passes by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import t5
from asbuilt.families.shared.common import ACTIVATION_NAMES, config_of, read_common, require_same
from asbuilt.families.shared.experts import MOST_EXPERTS
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Entry, StackExperts, Table
from asbuilt.spec import MLP, Activation, MixtureOfExperts, Model, Router

FAMILY = "switch_transformers"
PREFIX = "switch_transformers."
HEADS = ("SwitchTransformersForConditionalGeneration",)
DEFAULTS: dict[str, Any] = {"vocab_size": 32128, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
STEPS = {"encoder": "num_sparse_encoder_layers", "decoder": "num_sparse_decoder_layers"}
N_EXPERTS = 8  # where a config does not say
EXPERTS = {"up": "wi", "down": "wo"}


def build(
    sizes: t5.Sizes,
    *,
    d_ff: int,
    n_experts: int,
    capacity: int,
    sparse: tuple[list[bool], list[bool]],
    activation: Activation = "relu",
    router_bias: bool = False,
) -> Model:
    """Returns the model; `sparse` says of each layer, the encoder's and the decoder's, whether it has experts."""
    dense = MLP(d_model=sizes.d_model, d_ff=d_ff, activation=activation)
    experts = MixtureOfExperts(
        d_model=sizes.d_model,
        d_ff=d_ff,
        n_experts=n_experts,
        activation=activation,
        router=Router(d_model=sizes.d_model, n_experts=n_experts, top_k=1, bias=router_bias),
        gating="none",
        capacity=capacity,
    )
    read, written = ([experts if is_sparse else dense for is_sparse in stack] for stack in sparse)
    return sizes.model(read, written, tied=True, scaled=True)


def is_sparse(layer: int, step: int) -> bool:
    """Returns whether the layer has experts: every one at a step of 1, else the second of each `step`; none at 0."""
    return step == 1 or (step > 0 and layer % step == 1)


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' class.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS, encoder_decoder=True)
    for key in ("router_jitter_noise", "router_z_loss_coef", "router_aux_loss_coef", "add_router_probs"):
        reader.irrelevant(key, "training only")
    reader.only("num_selected_experts", 1, reason="each token goes to one expert in this family")
    reader.only("batch_prioritized_routing", False, reason="tokens take their places in order in this family")
    reader.irrelevant("router_type", "tokens choose, whatever it says")
    reader.irrelevant("router_ignore_padding_tokens", "no code reads it")
    reader.irrelevant("num_sparse_encoder_layers", "carried, encoder_sparse_step says it as it is written")
    reader.irrelevant("num_sparse_decoder_layers", "carried, decoder_sparse_step says it as it is written")
    reader.only("tie_word_embeddings", True, reason="embeddings that are not shared are not read in this family")
    reader.only("router_dtype", "float32", reason="routers compute in float32")
    reader.only("feed_forward_proj", "relu", reason="dense_act_fn names the activation, and there are no gates")
    reader.only("is_gated_act", False, reason="there are no gates")
    sizes = t5.read_sizes(reader, DEFAULTS)
    n_layers = t5.read_layers(reader, DEFAULTS["num_layers"], 12)
    most = MOST_EXPERTS // sum(n_layers)
    shape: dict[str, Any] = {
        "d_ff": reader.size("d_ff", default=DEFAULTS["d_ff"]),
        "n_experts": reader.size("num_experts", default=N_EXPERTS, most=most),
        "capacity": reader.size("expert_capacity", default=64),
        "activation": reader.choice("dense_act_fn", choices=ACTIVATION_NAMES, default="relu"),
        "router_bias": reader.flag("router_bias", default=False),
    }
    sparse = tuple(_read_sparse(reader, stack, n) for stack, n in zip(STEPS, n_layers, strict=True))
    reader.finish()
    spec = build(sizes, sparse=(sparse[0], sparse[1]), **shape)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _read_sparse(reader: ConfigReader, stack: str, n_layers: int) -> list[bool]:
    """Returns which of the layers have experts: those of the step, which follows from their number unless it is said.

    No sparse layer at all is a step of all layers, whose second has experts all the same.
    """
    sparse = reader.size(STEPS[stack], default=3, least=0)
    key = f"{stack}_sparse_step"
    step = reader.size(key, default=n_layers // sparse if sparse else n_layers, least=0)
    reader.irrelevant(key, "carried, since several steps may mean the same layers")
    return [is_sparse(layer, step) for layer in range(n_layers)]


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    encoder, _, first = t5.stacks(spec, FAMILY)
    mixtures = (body for stack in (encoder, spec) for body in bodies(stack) if isinstance(body, MixtureOfExperts))
    ffn = next(mixtures, None)
    plain = t5.write_ffn(first.body, FAMILY)
    written = t5.write_sizes(spec, FAMILY, HEADS[0]) | {key: plain[key] for key in ("d_ff", "dense_act_fn")}
    for stack, layers in (("encoder", encoder), ("decoder", spec)):
        written |= _write_sparse(stack, [isinstance(body, MixtureOfExperts) for body in bodies(layers)], carried)
    if ffn is None:
        written |= {"num_experts": N_EXPERTS}  # no layer has any, and one that is not said would be another model's
    else:
        written |= {"num_experts": ffn.n_experts, "expert_capacity": ffn.capacity, "router_bias": ffn.router.bias}
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def bodies(stack: Model) -> list[Any]:
    """Returns what each block's feed-forward is, None where it has no such branch."""
    named = ({branch.name: branch.body for branch in block.branches} for block in stack.blocks)
    return [one.get("ffn") for one in named]


def _write_sparse(stack: str, sparse: list[bool], carried: dict[str, Any]) -> dict[str, int]:
    """Returns the step that means these layers, the carried one where it does."""
    key, n = f"{stack}_sparse_step", len(sparse)
    said = [carried[key]] if isinstance(carried.get(key), int) else []
    for step in (*said, *range(n + 1)):
        if [is_sparse(layer, step) for layer in range(n)] == sparse:
            return {key: step}
    raise InputError(f"{FAMILY} has experts every so many layers", field="blocks", value=sparse)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors, an expert's each by itself."""
    whole = t5.table_of(spec, FAMILY, "mlp")
    encoder, _, _ = t5.stacks(spec, FAMILY)
    experts = [*_expert_entries(encoder, "encoder."), *_expert_entries(spec, "")]
    return replace(whole, entries=(*whole.entries, *experts))


def _expert_entries(stack: Model, place: str) -> list[Entry]:
    return [
        Entry(
            paths=(f"{place}blocks.{i}.ffn.body.{part}",),
            names=tuple(
                f"{place or 'decoder.'}block.{i}.layer.{len(block.branches) - 1}.mlp.experts.expert_{e}.{name}.weight"
                for e in range(body.n_experts)
            ),
            layout=StackExperts(body.n_experts),
        )
        for i, (block, body) in enumerate(zip(stack.blocks, bodies(stack), strict=True))
        if isinstance(body, MixtureOfExperts)
        for part, name in EXPERTS.items()
    ]
