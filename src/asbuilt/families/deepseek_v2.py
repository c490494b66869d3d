"""The deepseek_v2 family: latent attention, and softmax routing that may be limited to the best groups of experts.

DeepSeek-AI 2024 (arXiv 2405.04434).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared import experts, latent
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Fixed, Only, Values
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import sizes
from asbuilt.spec import ExpertGroups

METHODS = {"greedy": False, "group_limited_greedy": True}


class _Groups:
    """Whether the choice is limited to some groups of experts; under `greedy` their numbers are without effect."""

    keys = ("n_group", "topk_group", "topk_method")

    def read(self, reader: ConfigReader, values: Values) -> None:
        whole, some, method = self.keys
        n_experts, groups, most = values["n_experts"], None, values["n_experts"]
        if reader.choice(method, choices=METHODS, default="greedy"):
            n_groups, top_groups = reader.size(whole), reader.size(some)
            reader.require(whole, n_experts % n_groups == 0, f"a divisor of the {n_experts} experts")
            reader.require(some, top_groups <= n_groups, f"at most the {n_groups} groups")
            if top_groups < n_groups:
                groups = ExpertGroups(n_groups=n_groups, top_groups=top_groups, score="best")
                most = n_experts // n_groups * top_groups
        for key in self.keys:
            reader.irrelevant(key, "carried, since without a limit they mean nothing")
        reader.require(reader.names["top_k"], values["top_k"] <= most, f"at most the {most} experts")
        values["groups"] = groups

    def write(self, parts: Parts) -> dict[str, Any]:
        whole, some, method = self.keys
        said: dict[str, Any] = {key: parts.carried[key] for key in self.keys if key in parts.carried}
        groups = parts.mixture.router.groups
        if groups is not None:
            return {whole: groups.n_groups, some: groups.top_groups, method: "group_limited_greedy"}
        if METHODS.get(said.get(method, "greedy")) and said.get(whole) != said.get(some):
            said[method] = "greedy"
        return said


ROUTER = experts.routed(
    Fixed("scoring_func", "softmax", reason="this family scores by softmax"),
    Only("norm_topk_prob", False, None, reason="transformers and the published code differ in what follows"),
    *experts.counts("n_routed_experts", "num_experts", n_experts=64),
    _Groups(),
    experts.routed_scale(1.0),
)

FAMILY = Family(
    name="deepseek_v2",
    heads=("DeepseekV2ForCausalLM",),
    keys=latent.keys(  # defaults as in transformers' DeepseekV2Config
        sizes(n_vocab=102400, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
        ROUTER,
        d_expert=1407,
        n_shared=2,
        n_dense=0,
    ),
    build=latent.build,
    names=latent.NAMES,
)
