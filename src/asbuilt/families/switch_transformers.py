"""The switch_transformers family: t5 with a mixture of experts every few layers, one expert per token.

Fedus et al. 2021 (arXiv 2101.03961). An expert takes a limited number of tokens of a sequence; the others skip it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from asbuilt.errors import InputError
from asbuilt.families import t5
from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.experts import MOST_EXPERTS
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Choice, Fixed, Flag, Irrelevant, Only, Size, Values, defaults
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import MixtureOfExperts, Model, Router

N_EXPERTS = 8  # where a config does not say


def build(
    *,
    n_experts: int,
    capacity: int,
    sparse: tuple[list[bool], list[bool]],
    router_bias: bool = False,
    n_buckets: int = 32,
    max_distance: int = 128,
    eps: float = 1e-6,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model; `sparse` says of each layer, the encoder's and the decoder's, whether it has experts."""
    made = sized(sizes, activation="relu", tied=True)
    router = Router(d_model=made.d_model, n_experts=n_experts, top_k=1, bias=router_bias)
    experts = replace(made.mixture(router), gating="none", capacity=capacity)
    read, written = ([experts if one else made.plain() for one in stack] for stack in sparse)
    return t5.stacks(made, read, written, n_buckets=n_buckets, max_distance=max_distance, eps=eps)


def is_sparse(layer: int, step: int) -> bool:
    """Returns whether the layer has experts: every one at a step of 1, else the second of each `step`; none at 0."""
    return step == 1 or (step > 0 and layer % step == 1)


class _Sparse:
    """Which layers have experts: those of the step, which follows from their number unless it is said.

    With no sparse layer the step is the number of layers, and the second layer has experts all the same.
    """

    stacks = ("encoder", "decoder")

    def read(self, reader: ConfigReader, values: Values) -> None:
        n_layers = (values["n_layers"], values.pop("n_decoder_layers"))
        found = []
        for stack, n in zip(self.stacks, n_layers, strict=True):
            sparse = reader.size(f"num_sparse_{stack}_layers", default=3, least=0)
            key = f"{stack}_sparse_step"
            step = reader.size(key, default=n // sparse if sparse else n, least=0)
            reader.irrelevant(f"num_sparse_{stack}_layers", f"carried, {key} says it as it is written")
            reader.irrelevant(key, "carried, since several steps may mean the same layers")
            found.append([is_sparse(layer, step) for layer in range(n)])
        values["sparse"] = tuple(found)

    def write(self, parts: Parts) -> dict[str, Any]:
        written = {}
        for stack, model in zip(self.stacks, (parts.encoder.model, parts.model), strict=True):
            key, sparse = f"{stack}_sparse_step", [isinstance(body, MixtureOfExperts) for body in bodies(model)]
            said = [parts.carried[key]] if isinstance(parts.carried.get(key), int) else []
            steps = (*said, *range(len(sparse) + 1))
            fits = (step for step in steps if [is_sparse(i, step) for i in range(len(sparse))] == sparse)
            written[key] = next(fits, None)
            if written[key] is None:
                raise InputError(f"{parts.family} has experts every so many layers", field="blocks", value=sparse)
        return written


def bodies(stack: Model) -> list[Any]:
    """Returns what each block's feed-forward is, None where it has no such branch."""
    named = ({branch.name: branch.body for branch in block.branches} for block in stack.blocks)
    return [one.get("ffn") for one in named]


def _mixture(parts: Parts) -> MixtureOfExperts | None:
    """Returns the first experts of either stack, None where no layer has any."""
    found = (body for stack in (parts.encoder.model, parts.model) for body in bodies(stack))
    return next((body for body in found if isinstance(body, MixtureOfExperts)), None)


@dataclass(frozen=True)
class _Experts:
    """Keys of the experts; where no layer has any, only their number is written, since the default is another."""

    keys = (
        Size(
            "num_experts",
            "n_experts",
            default=N_EXPERTS,
            most=lambda values: MOST_EXPERTS // (values["n_layers"] + values["n_decoder_layers"]),
        ),
        Size("expert_capacity", "capacity", default=64),
        Flag("router_bias", "router_bias", default=False),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        for key in self.keys:
            key.read(reader, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        ffn = _mixture(parts)
        found = (N_EXPERTS,) if ffn is None else (ffn.n_experts, ffn.capacity, ffn.router.bias)
        return {key.key: value for key, value in zip(self.keys, found, strict=False)}


FAMILY = Family(
    name="switch_transformers",
    prefix="switch_transformers.",
    heads=("SwitchTransformersForConditionalGeneration",),
    encoder_decoder=True,
    keys=(  # defaults as in transformers' SwitchTransformersConfig
        *defaults(t5.KEYS, d_model=768, n_heads=12, n_layers=12, n_decoder_layers=12),
        Choice(
            "dense_act_fn",
            "activation",
            default="relu",
            choices=ACTIVATION_NAMES,
            written={"gelu_tanh": t5.written_activation("gelu_tanh")},
        ),
        _Experts(),
        _Sparse(),
        Irrelevant("training only", "router_jitter_noise", "add_router_probs"),
        Only("num_selected_experts", 1, reason="each token goes to one expert in this family"),
        Only("batch_prioritized_routing", False, reason="experts take tokens in order in this family"),
        Irrelevant("tokens choose experts, whatever it says", "router_type"),
        Irrelevant("no code reads it", "router_ignore_padding_tokens"),
        Fixed("tie_word_embeddings", True, reason="embeddings that are not shared are not supported in this family"),
        Only("router_dtype", "float32", reason="routers compute in float32"),
        Only("feed_forward_proj", "relu", reason="dense_act_fn names the activation, and there are no gates"),
        Only("is_gated_act", False, reason="there are no gates"),
    ),
    build=build,
    names=partial(t5.names, ffn="mlp"),
)
