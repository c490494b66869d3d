"""LoRA adapters beside a model: the bytes that an engine reserves for them, and what each token computes more.

Every linear map of the blocks but routers and routed experts, or those named, has A (rank, d_in) and B (d_out, rank)
for each of `count` adapters (vLLM's `--max-loras` and `--max-lora-rank`), in the dtype of activations. They are divided
over devices as the map is: one that divides its inputs divides A, one that divides its outputs B. Each token computes
one adapter; a step reads as many as it has sequences, at most all (arXiv 2106.09685; arXiv 2311.03285).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from asbuilt.errors import InputError
from asbuilt.plan.devices import DeviceStage, device
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import precision
from asbuilt.spec import Kind, Model, Pass
from asbuilt.spec.adapters import adapted, is_pattern

MOST = 10_000
ADAPTER = ("lora_a", "lora_b")
PLAIN = precision("bf16")  # of whose bytes none are counted here


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """`count` adapters of one rank; `spec` is the model with one of them."""

    count: int
    rank: int
    targets: tuple[str, ...] | None
    spec: Model = field(repr=False)

    def numbers(self, layout: Placement, stage: int) -> dict[Kind, int]:
        """Returns the numbers of one adapter on a device of a stage, by kind of part."""
        found: dict[Kind, int] = {}
        for entry in self._stage(layout, stage).folds.stored:
            if entry.name.endswith(ADAPTER) and entry.node is not None:
                found[entry.kind] = found.get(entry.kind, 0) + entry.weight.size * entry.count
        return found

    def products(self, layout: Placement, stage: int, run: Pass) -> dict[Kind, int]:
        """Returns the FLOPs of a pass in adapters on a device of a stage, by kind of part."""
        found: dict[Kind, int] = {}
        for node, seen in self._stage(layout, stage).folds.root.runs(run):
            flops = sum(p.flops for p in node.own.multiplies(seen) if (p.weight or "").endswith(ADAPTER))
            if flops:
                found[node.whole.kind] = found.get(node.whole.kind, 0) + int(flops) * node.count
        return found

    def _stage(self, layout: Placement, stage: int) -> DeviceStage:
        return device(self.spec, layout, PLAIN).stages[stage]


def adapters(
    spec: Model, count: int | None, rank: int | None, targets: tuple[str, ...] | None, *, offloaded: bool
) -> Adapters | None:
    """Returns the adapters, None without a count; raises InputError naming the argument at fault."""
    if count is None:
        for name, value in (("lora-rank", rank), ("lora-targets", targets)):
            if value is not None:
                raise InputError("needs a number of adapters", field=name, value=value, fix="give --lora N")
        return None
    if rank is None:
        raise InputError("is missing", field="lora-rank", fix="the rank of the adapters, such as 16")
    for name, value, most in (("lora", count, MOST), ("lora-rank", rank, 2**20)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputError(field=name, value=value, allowed=f"a whole number from 1 to {most:,}")
    if offloaded:
        raise InputError("is not planned with layers in host memory", field="lora", value=count, fix="leave one out")
    for target in targets or ():
        if is_pattern(target):
            raise InputError("is a pattern", field="lora-targets", value=target, allowed="names of maps: q,v,down")
    try:
        made = adapted(spec, rank, float(rank), targets)
    except InputError as error:
        names = {"targets": "lora-targets", "Lora.rank": "lora-rank"}
        raise InputError(
            error.problem, field=names.get(error.field, error.field), value=error.value, allowed=error.allowed
        ) from error
    return Adapters(count=count, rank=rank, targets=targets, spec=replace(made, name=spec.name))
