"""What families with experts share: the keys that count and choose them, and one stored matrix for each expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared import dimensions as shared
from asbuilt.families.shared.dimensions import Dimensions
from asbuilt.families.shared.key import Flag, Group, Irrelevant, Key, Size, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import REQUIRED, ConfigReader
from asbuilt.families.shared.table import Entry, StackExperts, Table
from asbuilt.spec import ExpertGroups, GatedMLP, MixtureOfExperts, Model, Router
from asbuilt.spec.experts import GroupScore, Scoring

# Every expert of every layer has names of its own, so their number is bounded before they are made; the largest
# published models have 61 layers of 384 experts.
MOST_EXPERTS = 2**18
CORRECTION = "e_score_correction_bias"  # what the checkpoints call Router.correction
GROUPS = ("n_group", "topk_group")


def _many(values: Values) -> int:
    return MOST_EXPERTS // values["n_layers"]


def counts(key: str, *also: str, n_experts: Any = REQUIRED, top_k: Any = REQUIRED) -> tuple[Key, ...]:  # noqa: ANN401
    """Returns the keys that count the experts and say how many each token takes; defaults as the class has them."""
    enough = lambda values: values["top_k"] <= values["n_experts"]  # noqa: E731
    return (
        Size(key, "n_experts", also=also, default=n_experts, most=_many, at=lambda parts: parts.mixture.n_experts),
        Size(
            "num_experts_per_tok",
            "top_k",
            default=top_k,
            must=(enough, lambda values: f"at most the {values['n_experts']} experts"),
            at=lambda parts: parts.mixture.top_k,
        ),
    )


# Whether the scores of a token's experts are divided by their sum.
RENORMALISE = Flag("norm_topk_prob", "renormalise", default=False, at=lambda parts: parts.mixture.router.renormalise)


def routed(*keys: Key, **fixed: Any) -> Group:  # noqa: ANN401
    """Returns the keys of a router, in which `fixed` are the fields that no key says."""

    def make(n_layers: int, **found: Any) -> Router:  # noqa: ANN401
        return Router(**fixed, **found)

    def given(values: Values) -> Values:
        return {"d_model": values["dimensions"].d_model, "n_layers": values["dimensions"].n_layers}

    training = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    return Group("router", make, (Irrelevant("training only", *training), *keys), given=given)


def expert_width(default: int) -> Size:
    """Returns the key of the width of an expert."""
    return Size("moe_intermediate_size", "d_expert", default=default, at=lambda parts: parts.mixture.d_ff)


# The key of the feed-forward's width, where that is the width of layers without experts alone.
DENSE_WIDTH = Irrelevant("of the dense layers, where there are any", "intermediate_size")


def dense_width(default: int) -> Callable[[Parts], int]:
    """Returns what finds the width of the layers without experts; where there are none, what was carried."""
    return lambda parts: parts.carried.get("intermediate_size", default) if parts.dense is None else parts.dense.d_ff


def read_router(
    reader: ConfigReader,
    d_model: int,
    n_layers: int,
    keys: tuple[str, ...],
    *,
    n_experts: int,
    top_k: int,
    renormalise: bool,
) -> Router:
    """Returns the softmax router of a config; `keys` spell the number of experts, `n_experts` and `top_k` are defaults.

    Raises InputError for experts that are more than can be named, or fewer than each token takes.
    """
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        reader.irrelevant(key, "training only")
    experts = reader.size(*keys, default=n_experts, most=MOST_EXPERTS // n_layers)
    chosen = reader.size("num_experts_per_tok", default=top_k)
    reader.require("num_experts_per_tok", chosen <= experts, f"at most the {experts} experts")
    return Router(d_model=d_model, n_experts=experts, top_k=chosen, renormalise=renormalise)


def read_grouped_router(
    reader: ConfigReader,
    d_model: int,
    n_layers: int,
    defaults: Mapping[str, Any],
    *,
    scoring: Scoring,
    score: GroupScore,
    correction: bool,
    eps: float,
) -> Router:
    """Returns the router of a config that may limit the choice to `topk_group` of `n_group` groups of experts.

    Where all groups are open there are none in the spec, and their number is carried. Raises InputError naming the key.
    """
    for key in ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"):
        reader.irrelevant(key, "training only")
    experts = reader.size(
        "n_routed_experts", "num_local_experts", default=defaults["n_routed_experts"], most=MOST_EXPERTS // n_layers
    )
    chosen = reader.size("num_experts_per_tok", default=defaults["num_experts_per_tok"])
    n_groups, top_groups = (reader.size(key, default=defaults[key]) for key in GROUPS)
    size, rest = divmod(experts, n_groups)
    least = 2 if score == "two_best" else 1
    reader.require("n_group", not rest and size >= least, f"a divisor of {experts} with {least} experts in each group")
    reader.require("topk_group", top_groups <= n_groups, f"at most the {n_groups} groups")
    reader.require("num_experts_per_tok", chosen <= top_groups * size, f"at most the {top_groups * size} experts")
    for key in GROUPS:
        reader.irrelevant(key, "carried, since as many open groups as there are mean nothing")
    renormalise = reader.flag("norm_topk_prob", default=defaults["norm_topk_prob"])
    limited = ExpertGroups(n_groups=n_groups, top_groups=top_groups, score=score) if top_groups < n_groups else None
    return Router(
        d_model=d_model,
        n_experts=experts,
        top_k=chosen,
        scoring=scoring,
        renormalise=renormalise,
        correction=correction,
        groups=limited,
        eps=eps if renormalise else 0.0,
        scale=reader.number("routed_scaling_factor", default=defaults["routed_scaling_factor"]),
    )


def write_grouped_router(router: Router, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that `read_grouped_router` reads."""
    said = [carried.get(key) for key in GROUPS]
    if router.groups is not None:
        said = [router.groups.n_groups, router.groups.top_groups]
    elif said[0] is None or said[0] != said[1]:
        said = [1, 1]
    return {
        "n_routed_experts": router.n_experts,
        "num_experts_per_tok": router.top_k,
        **dict(zip(GROUPS, said, strict=True)),
        "norm_topk_prob": router.renormalise,
        "routed_scaling_factor": float(router.scale),
    }


def read_first_dense(reader: ConfigReader, n_layers: int, default: int) -> int:
    """Returns how many of the first layers have no experts; raises InputError where none is left that has."""
    count = reader.size("first_k_dense_replace", default=default, least=0)
    reader.require("first_k_dense_replace", count < n_layers, f"less than the {n_layers} layers")
    return count


def first_dense(spec: Model) -> int:
    """Returns how many of the first layers have a gated feed-forward in place of experts."""
    bodies = [block.branches[-1].body for block in spec.blocks]
    return next((i for i, body in enumerate(bodies) if not isinstance(body, GatedMLP)), len(bodies))


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


def table(
    spec: Model, stems: dict[str, str], experts: dict[str, str], family: str, elsewhere: tuple[str, ...] = ()
) -> Table:
    """Returns the names of a checkpoint folder's tensors.

    Those within blocks are named by `stems`, and those of a layer's experts by `experts`, from the part's own name to
    a pattern in which `{}` is the expert's number. Stems in `elsewhere` have entries of their own.
    """
    whole = shared.table(spec, stems, family, elsewhere=("ffn.body", *elsewhere))
    return replace(whole, entries=(*whole.entries, *_expert_entries(spec, experts)))


def stacked_table(
    spec: Model,
    stems: dict[str, str],
    family: str,
    stored: Callable[[MixtureOfExperts], list[Entry]],
) -> Table:
    """Returns the names of a checkpoint folder's tensors where experts are stacked on disk too.

    `stored` gives the entries of the part's own weights, with names below the layer; weights that the part lacks are
    left out.
    """
    whole = shared.table(spec, stems, family, elsewhere=("ffn.body",))
    entries = []
    for i, part in sparse_layers(spec):
        for one in stored(part):
            if part.holds().keys() >= {*one.paths}:
                paths = tuple(f"blocks.{i}.ffn.body.{name}" for name in one.paths)
                names = tuple(f"model.layers.{i}.{name}" for name in one.names)
                entries.append(replace(one, paths=paths, names=names))
    return replace(whole, entries=(*whole.entries, *entries))


def sparse_layers(spec: Model) -> list[tuple[int, MixtureOfExperts]]:
    """Returns number and part of the layers whose feed-forward are experts."""
    branches = [(i, branch) for i, block in enumerate(spec.blocks) for branch in block.branches]
    bodies = [(i, branch.body) for i, branch in branches if branch.name == "ffn"]
    return [(i, body) for i, body in bodies if isinstance(body, MixtureOfExperts)]


def _expert_entries(spec: Model, patterns: dict[str, str]) -> list[Entry]:
    return [
        Entry(
            paths=(f"blocks.{i}.ffn.body.{part}",),
            names=tuple(f"model.layers.{i}.{pattern.format(e)}" for e in range(body.n_experts)),
            layout=StackExperts(body.n_experts),
        )
        for i, body in sparse_layers(spec)
        for part, pattern in patterns.items()
    ]
