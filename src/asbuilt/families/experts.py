"""What families with experts share: the keys that count and choose them, and one stored matrix for each expert."""

from __future__ import annotations

from dataclasses import replace

from asbuilt.errors import InputError
from asbuilt.families import dimensions as shared
from asbuilt.families.dimensions import Dimensions
from asbuilt.families.reader import ConfigReader
from asbuilt.families.table import Entry, StackExperts, Table
from asbuilt.spec import MixtureOfExperts, Model, Router

# Every expert of every layer has names of its own, so their number is bounded before they are made; the largest
# published models have 61 layers of 384 experts.
MOST_EXPERTS = 2**18


def read_router(reader: ConfigReader, d_model: int, n_layers: int, keys: tuple[str, ...], *, n_experts: int,
                top_k: int, renormalise: bool) -> Router:  # fmt: skip
    """Returns the softmax router of a config; `keys` spell the number of experts, `n_experts` and `top_k` are defaults.

    Raises InputError for experts that are more than can be named, or fewer than each token takes.
    """
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        reader.irrelevant(key, "training only")
    experts = reader.size(*keys, default=n_experts, most=MOST_EXPERTS // n_layers)
    chosen = reader.size("num_experts_per_tok", default=top_k)
    reader.require("num_experts_per_tok", chosen <= experts, f"at most the {experts} experts")
    return Router(d_model=d_model, n_experts=experts, top_k=chosen, renormalise=renormalise)


def mixture(dimensions: Dimensions, router: Router, d_ff: int | None = None) -> MixtureOfExperts:
    """Returns the mixture of experts of these dimensions, each expert `d_ff` wide where that is not the model's."""
    return MixtureOfExperts(
        d_model=dimensions.d_model,
        d_ff=d_ff or dimensions.d_ff,
        n_experts=router.n_experts,
        activation=dimensions.activation,
        router=router,
    )


def first_mixture(spec: Model, family: str) -> MixtureOfExperts:
    """Returns the first layer's mixture of experts; raises InputError for a model without any."""
    bodies = (branch.body for block in spec.blocks for branch in block.branches)
    found = next((body for body in bodies if isinstance(body, MixtureOfExperts)), None)
    if found is None:
        raise InputError(f"{family} has experts", field="blocks", allowed="MixtureOfExperts in some block")
    return found


def table(spec: Model, stems: dict[str, str], experts: dict[str, str], family: str) -> Table:
    """Returns the names of a checkpoint folder's tensors.

    Those within blocks are named by `stems`, and those of a layer's experts by `experts`, from the part's own name to
    a pattern in which `{}` is the expert's number.
    """
    whole = shared.table(spec, stems, family, elsewhere=("ffn.body",))
    return replace(whole, entries=(*whole.entries, *_expert_entries(spec, experts)))


def _expert_entries(spec: Model, patterns: dict[str, str]) -> list[Entry]:
    return [
        Entry(
            paths=(f"blocks.{i}.ffn.body.{part}",),
            names=tuple(f"model.layers.{i}.{pattern.format(e)}" for e in range(branch.body.n_experts)),
            layout=StackExperts(branch.body.n_experts),
        )
        for i, block in enumerate(spec.blocks)
        for branch in block.branches
        if branch.name == "ffn" and isinstance(branch.body, MixtureOfExperts)
        for part, pattern in patterns.items()
    ]
