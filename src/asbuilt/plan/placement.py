"""The placement of a model on devices: the degree of each kind of parallelism, and which ranks hold the same weights.

GPUs = dp * tp * pp * cp. Neighbouring ranks are grouped by tensor first, then context, then data, then pipeline, so
that the busiest groups stay within a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.errors import InputError, one_of

MOST_GPUS = 10**6


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Degrees of data, tensor, pipeline, expert and context parallelism, and the ZeRO stage (arXiv 1910.02054).

    The experts are spread over `ep` devices, and each expert's own matrices are divided over `etp` of them. In training
    etp is tp, and ep takes its ranks from data and context parallelism, as in Megatron-Core: ep divides dp * cp. In
    serving the experts are spread over the tp ranks first and, if ep exceeds tp, over groups of them that process
    different sequences; `redundant` further replicas of each mixture's experts are among them. ZeRO stage 1 shards
    master weights and optimizer state over the dp * cp ranks that hold the same weights, stage 2 the gradients too,
    stage 3 (FSDP) the weights too; with `hsdp`, over groups of so many of them, which average their gradients (HSDP).
    Without `vocabulary` each of tp devices has the whole embedding and head.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    zero: int = 0
    etp: int = 1
    vocabulary: bool = True
    hsdp: int | None = None
    redundant: int = 0

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights, and average their gradients in training."""
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO shards dense weights."""
        return self.hsdp or self.replicas

    @property
    def sharded_experts(self) -> int:
        """Ranks over which ZeRO shards experts: of those ranks the ones that hold the same experts."""
        return max(1, self.sharded // self.groups) if self.hsdp else self.copies

    @property
    def groups(self) -> int:
        """Groups of tp devices that share one set of experts, each processing its own sequences."""
        return self.ep * self.etp // self.tp

    @property
    def copies(self) -> int:
        """Ranks that hold the same experts: full copies of the model."""
        return self.replicas // self.groups

    @property
    def per_copy(self) -> int:
        """Devices of one copy of the model."""
        return self.gpus // self.copies

    @property
    def wide(self) -> int:
        """Devices that share one layer of a copy."""
        return self.groups * self.tp

    @property
    def sharding(self) -> tuple[int, int]:
        """The arguments of `Part.shard`: devices that divide a layer, and those over which its experts are spread."""
        return self.tp, self.tp // self.etp

    @property
    def said(self) -> str:
        """The placement as options: --tp 2 --pp 4 --zero 1."""
        degrees = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("cp", self.cp))
        whole = [] if self.vocabulary else ["--no-divide-vocabulary"]
        return " ".join([*(f"--{name} {n}" for name, n in degrees if n > 1), f"--zero {self.zero}", *whole])


def arrange(
    gpus: int,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    zero: int = 0,
    vocabulary: bool = True,
    hsdp: int | None = None,
) -> Placement:
    """Returns the training placement, with the remaining GPUs used for data parallelism.

    Raises InputError naming the degree if the degrees do not divide the GPUs.
    """
    for name, degree in (("gpus", gpus), ("tp", tp), ("pp", pp), ("ep", ep), ("cp", cp)):
        if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MOST_GPUS:
            raise InputError(field=name, value=degree, allowed=f"a whole number from 1 to {MOST_GPUS:,}")
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise InputError(field="zero", value=zero, allowed="0, 1, 2 or 3")
    taken = tp * pp * cp
    if gpus % taken:
        raise InputError(
            f"tp x pp x cp = {tp} x {pp} x {cp} = {taken} does not divide the GPUs",
            field="gpus",
            value=gpus,
            allowed=f"a multiple of {taken}",
            fix="the rest is used for dp",
        )
    replicas = gpus // (tp * pp)
    if replicas % ep:
        allowed = one_of(map(str, divisors(replicas)))
        raise InputError(f"ep takes its ranks from dp x cp = {replicas}", field="ep", value=ep, allowed=allowed)
    if hsdp is not None and (not zero or hsdp < 1 or replicas % hsdp):
        allowed = one_of(map(str, divisors(replicas)))
        raise InputError(
            f"a group that shards, of dp x cp = {replicas} ranks",
            field="hsdp",
            value=hsdp,
            allowed=f"{allowed}, with ZeRO",
        )
    degrees = {"tp": tp, "pp": pp, "ep": ep, "cp": cp, "etp": tp, "zero": zero}
    return Placement(dp=gpus // taken, **degrees, vocabulary=vocabulary, hsdp=hsdp)


def served(gpus: int = 1, *, tp: int = 1, pp: int = 1, ep: int = 1, redundant: int = 0) -> Placement:
    """Returns the serving placement of full copies on `gpus` devices; `ep` is a divisor or a multiple of `tp`."""
    wide = max(tp, ep)
    return Placement(dp=gpus // (tp * pp), tp=tp, pp=pp, ep=ep, etp=wide // ep, redundant=redundant)


def divisors(n: int) -> list[int]:
    """Returns the divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
