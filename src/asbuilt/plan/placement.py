"""Where a model lies: the degrees of each kind of parallelism, and which ranks hold the same.

GPUs = dp * tp * pp * cp. Neighbouring ranks share a tensor first, then a context, then a batch, then the pipeline, so
the busiest groups stay within a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.errors import InputError

MOST_GPUS = 10**6


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Degrees of data, tensor, pipeline, expert and context parallelism, and the ZeRO stage (arXiv 1910.02054).

    The experts go to `ep` devices, each expert's own matrices are divided over `etp` of them. In training that is tp,
    and ep takes its ranks from data and context parallelism, as Megatron-Core has it: ep divides dp * cp. In serving
    the experts go to the tp ranks first, and where ep is more than those, to groups of them with sequences of their
    own. ZeRO stage 1 shards master weights and optimizer state over the dp * cp ranks that hold the same weights, 2 the
    gradients too, 3 (FSDP) the weights too.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    zero: int = 0
    etp: int = 1

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights, and in training average their gradients."""
        return self.dp * self.cp

    @property
    def groups(self) -> int:
        """Groups of tp devices that share one set of experts, each with sequences of its own."""
        return self.ep * self.etp // self.tp

    @property
    def copies(self) -> int:
        """Ranks that hold the same experts: whole copies of the model."""
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
        """What `Part.shard` takes: devices that divide a layer, and those of them that share out its experts."""
        return self.tp, self.tp // self.etp

    @property
    def said(self) -> str:
        """As options: --tp 2 --pp 4 --zero 1."""
        degrees = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("cp", self.cp))
        return " ".join([*(f"--{name} {n}" for name, n in degrees if n > 1), f"--zero {self.zero}"])


def arrange(gpus: int, *, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, zero: int = 0) -> Placement:
    """Returns the placement of training with the data parallelism that is left.

    Raises InputError naming the degree where they do not multiply to the GPUs.
    """
    for name, degree in (("gpus", gpus), ("tp", tp), ("pp", pp), ("ep", ep), ("cp", cp)):
        if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MOST_GPUS:
            raise InputError("not allowed", field=name, value=degree, allowed=f"a whole number from 1 to {MOST_GPUS:,}")
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise InputError("not allowed", field="zero", value=zero, allowed="0, 1, 2, 3")
    taken = tp * pp * cp
    if gpus % taken:
        raise InputError(
            f"tp x pp x cp = {tp} x {pp} x {cp} = {taken} does not divide the GPUs",
            field="gpus",
            value=gpus,
            allowed=f"a multiple of {taken}",
            fix="dp is what is left",
        )
    replicas = gpus // (tp * pp)
    if replicas % ep:
        allowed = ", ".join(map(str, divisors(replicas)))
        raise InputError(f"ep takes its ranks from dp x cp = {replicas}", field="ep", value=ep, allowed=allowed)
    return Placement(dp=gpus // taken, tp=tp, pp=pp, ep=ep, cp=cp, zero=zero, etp=tp)


def served(gpus: int = 1, *, tp: int = 1, pp: int = 1, ep: int = 1) -> Placement:
    """Returns the placement of serving on so many devices, which hold whole copies; `ep` divides `tp` or is divided."""
    wide = max(tp, ep)
    return Placement(dp=gpus // (tp * pp), tp=tp, pp=pp, ep=ep, etp=wide // ep)


def divisors(n: int) -> list[int]:
    """Returns the divisors of n, in order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
