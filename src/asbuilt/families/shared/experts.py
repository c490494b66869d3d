"""What families with experts share: the keys of their number and of the router."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families.shared.key import Flag, Group, Irrelevant, Key, Number, Size, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import REQUIRED, ConfigReader, is_whole
from asbuilt.spec import ExpertGroups, GatedMLP, MixtureOfExperts, Model, Router
from asbuilt.spec.experts import GroupScore

# Every expert of every layer has names of its own, so their number is bounded before they are made; the largest
# published models have 61 layers of 384 experts.
MOST_EXPERTS = 2**18
EPS = 1e-20  # of the sum that chosen scores are divided by, in DeepSeek's routers and those after them
TRAINING = Irrelevant("training only", "router_jitter_noise")


def counts(key: str, *also: str, n_experts: Any = REQUIRED, top_k: Any = REQUIRED) -> tuple[Key, ...]:  # noqa: ANN401
    """Returns the keys that count the experts and say how many each token takes; defaults as the class has them."""
    return (
        Size(
            key,
            "n_experts",
            also=also,
            default=n_experts,
            most=lambda values: MOST_EXPERTS // values["n_layers"],
            at="mixture.n_experts",
        ),
        Size(
            "num_experts_per_tok",
            "top_k",
            default=top_k,
            must=(
                lambda values: values["top_k"] <= values["n_experts"],
                lambda values: f"at most the {values['n_experts']} experts",
            ),
            at="mixture.top_k",
        ),
    )


def renormalise(default: bool = False) -> Flag:
    """Returns the key that says whether the scores of a token's experts are divided by their sum."""
    return Flag("norm_topk_prob", "renormalise", default=default, at="mixture.router.renormalise")


def routed_scale(default: float) -> Number:
    """Returns the key of what the weights of a token's experts are multiplied by."""
    return Number("routed_scaling_factor", "scale", default=default, at="mixture.router.scale")


def routed(*keys: Key, **fixed: Any) -> Group:  # noqa: ANN401
    """Returns the keys of a router, in which `fixed` are the fields that no key says.

    An `eps` is that of the sum by which scores are divided, where they are.
    """

    def make(n_layers: int, **found: Any) -> Router:  # noqa: ANN401
        fields: dict[str, Any] = fixed | found
        return Router(**{key: value for key, value in fields.items() if key != "eps" or fields["renormalise"]})

    return Group("router", make, keys, given=lambda values: {key: values[key] for key in ("d_model", "n_layers")})


def corrected(*keys: Key, scale: float) -> Group:
    """Returns the keys of a router as DeepSeek-V3 has it, whose scores are multiplied by `scale` unless said."""
    more = (*keys, renormalise(True), routed_scale(scale))
    return routed(*more, scoring="sigmoid", correction=True, eps=EPS)


def corrected_router(d_model: int, n_experts: int, top_k: int, **fields: Any) -> Router:  # noqa: ANN401
    """Returns such a router; its experts are one group unless the other `fields` say."""
    usual: dict[str, Any] = {"scoring": "sigmoid", "renormalise": True, "correction": True, "eps": EPS}
    return Router(d_model=d_model, n_experts=n_experts, top_k=top_k, **(usual | fields))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Groups:
    """How the choice may be limited to `topk_group` of `n_group` groups of experts; defaults as the class has them.

    Where all groups are open there are none in the spec, and their number is carried.
    """

    n_group: int
    topk_group: int
    score: GroupScore

    keys = ("n_group", "topk_group")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the groups; raises InputError where they are not of one size, or too small."""
        whole, some = self.keys
        n_groups, top_groups = reader.size(whole, default=self.n_group), reader.size(some, default=self.topk_group)
        size, rest = divmod(values["n_experts"], n_groups)
        least = 2 if self.score == "two_best" else 1
        allowed = f"a divisor of {values['n_experts']} with {least} experts in each group"
        reader.require(whole, not rest and size >= least, allowed)
        reader.require(some, top_groups <= n_groups, f"at most the {n_groups} groups")
        most = top_groups * size
        reader.require(reader.names["top_k"], values["top_k"] <= most, f"at most the {most} experts")
        for key in self.keys:
            reader.irrelevant(key, "carried, since as many open groups as there are mean nothing")
        values["groups"] = None
        if top_groups < n_groups:
            values["groups"] = ExpertGroups(n_groups=n_groups, top_groups=top_groups, score=self.score)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the numbers, without groups those that were carried, if they limit nothing."""
        said, groups = [parts.carried.get(key) for key in self.keys], parts.mixture.router.groups
        if groups is not None:
            said = [groups.n_groups, groups.top_groups]
        elif said[0] is None or said[0] != said[1]:
            said = [1, 1]
        return dict(zip(self.keys, said, strict=True))


class DenseLayers:
    """Which layers have no experts: all but every `decoder_sparse_step`-th, and those in `mlp_only_layers`.

    The keys are carried too, since several ways of saying it are the same.
    """

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers; raises InputError where none has experts."""
        step_key, only_key = self.keys
        step, n_layers = reader.size(step_key, default=1), values["n_layers"]
        listed = reader.config[only_key] if reader.given(only_key) else []
        reader.require(only_key, isinstance(listed, list) and all(map(is_whole, listed)), "a list of layers")
        for key in self.keys:
            reader.irrelevant(key, "the blocks say it")
        values["dense"] = self._layers(step, listed, n_layers)
        reader.require(step_key, len(values["dense"]) < n_layers, "such that some layer has experts")

    @staticmethod
    def _layers(step: int, listed: list[int], n_layers: int) -> frozenset[int]:
        only = set(listed)
        return frozenset(i for i in range(n_layers) if i in only or (i + 1) % step)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys that were carried, if they mean these layers, or a list of them."""
        blocks = enumerate(parts.model.blocks)
        dense = frozenset(i for i, block in blocks if isinstance(block.branches[-1].body, GatedMLP))
        step, listed = (parts.carried.get(key) for key in self.keys)
        if self._layers(step or 1, listed or [], parts.n_layers) == dense:
            return {key: parts.carried[key] for key in self.keys if key in parts.carried}
        return dict(zip(self.keys, (1, sorted(dense)), strict=True))


class LayerKinds:
    """Which layers have experts, as `mlp_layer_types` says; where it is missing another key has said it before."""

    key, names = "mlp_layer_types", {True: "sparse", False: "dense"}

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the list, if there is one, in the place of the number of first layers without experts."""
        if not reader.given(self.key):
            return
        said, n_layers = reader.config[self.key], values["n_layers"]
        ok = isinstance(said, list) and len(said) == n_layers and all(one in ("sparse", "dense") for one in said)
        reader.require(self.key, ok and "sparse" in said, f"a list of {n_layers} values, dense or sparse, some sparse")
        values |= {"n_dense": 0, "dense": frozenset(i for i, one in enumerate(said) if one == "dense")}

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        found = {i for i, _ in sparse_layers(parts.model)}
        return {self.key: [self.names[i in found] for i in range(parts.n_layers)]}


def expert_width(default: int) -> Size:
    """Returns the key of the width of an expert."""
    return Size("moe_intermediate_size", "d_expert", default=default, at="mixture.d_ff")


def dense(key: Size) -> Size:
    """Returns the key as that of the width of the layers without experts; where there are none, it is as carried."""

    def found(parts: Parts) -> int:
        return parts.carried.get(key.key, key.default) if parts.dense is None else parts.dense.d_ff

    return replace(key, at=found, carried="of the dense layers, where there are any")


def shared_of(parts: Parts) -> int | None:
    """Returns how many shared experts there are: they are stored as one, as wide as all of them."""
    ffn = parts.mixture
    if ffn.shared is None:
        return None
    wide = ffn.shared if ffn.shared.d_ff % ffn.d_ff == 0 else None
    return parts.expect(wide, GatedMLP, "blocks.0.ffn.body.shared").d_ff // ffn.d_ff


def fine_grained(*, d_expert: int, n_shared: int, n_dense: int) -> tuple[Key, ...]:
    """Returns the keys of the width of an expert, of how many every token takes, and of the first layers without any.

    There is one shared expert at least, and a layer with experts.
    """

    def shared(parts: Parts) -> int:
        parts.expect(parts.mixture.shared, GatedMLP, "blocks.0.ffn.body.shared")
        return shared_of(parts) or 1

    def first_dense(parts: Parts) -> int:
        bodies = [block.branches[-1].body for block in parts.model.blocks]
        return next((i for i, body in enumerate(bodies) if not isinstance(body, GatedMLP)), len(bodies))

    some = (
        lambda values: values["n_dense"] < values["n_layers"],
        lambda values: f"less than the {values['n_layers']} layers",
    )
    return (
        expert_width(d_expert),
        Size("n_shared_experts", "n_shared", default=n_shared, at=shared),
        Size("first_k_dense_replace", "n_dense", default=n_dense, least=0, must=some, at=first_dense),
    )


def sparse_layers(spec: Model) -> list[tuple[int, MixtureOfExperts]]:
    """Returns number and part of the layers whose feed-forward are experts."""
    branches = [(i, branch) for i, block in enumerate(spec.blocks) for branch in block.branches]
    bodies = [(i, branch.body) for i, branch in branches if branch.name == "ffn"]
    return [(i, body) for i, body in bodies if isinstance(body, MixtureOfExperts)]
