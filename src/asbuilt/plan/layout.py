"""How the GPUs share the work: the degrees of each kind of parallelism, and which ranks stand beside each other.

GPUs = dp * tp * pp * cp. Expert parallelism takes its ranks from data and context parallelism, as Megatron-Core has it:
ep divides dp * cp, and the tokens go to the experts and back. Neighbouring ranks share a tensor first, then a context,
then a batch, then the pipeline, so the busiest groups stay within a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.errors import InputError

Bytes = int | float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of data, tensor, pipeline, expert and context parallelism, and the ZeRO stage (arXiv 1910.02054).

    Stage 1 shards master weights and optimizer state over the dp * cp ranks that hold the same weights, 2 the gradients
    too, 3 (FSDP) the weights too.
    """

    dp: int
    tp: int
    pp: int
    ep: int
    cp: int
    zero: int

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights, and average their gradients."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.replicas // self.ep

    @property
    def said(self) -> str:
        """As options: --tp 2 --pp 4 --zero 1."""
        degrees = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("cp", self.cp))
        return " ".join([*(f"--{name} {n}" for name, n in degrees if n > 1), f"--zero {self.zero}"])


def arrange(gpus: int, *, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, zero: int = 0) -> Layout:
    """Returns the layout with the data parallelism that is left.

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
    return Layout(dp=gpus // taken, tp=tp, pp=pp, ep=ep, cp=cp, zero=zero)


MOST_GPUS = 10**6


def divisors(n: int) -> list[int]:
    """Returns the divisors of n, in order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@dataclass(frozen=True, kw_only=True)
class Network:
    """What joins `gpus` GPUs: `link` bytes/s one way within a node of `node` of them, `between` per GPU across nodes.

    `host` is the way to the CPU's memory. `named` says where each figure comes from.
    """

    gpus: int
    node: int
    link: float
    between: float
    host: float
    named: dict[str, str]

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes/s of a ring of `size` ranks that stand `stride` apart: as slow as its slowest link."""
        return self.link if self.inside(size, stride) else min(self.link, self.between)

    def inside(self, size: int, stride: int) -> bool:
        """Whether every such ring stays within a node: groups of a size that does not divide the node straddle two."""
        span = size * stride
        return self.gpus <= self.node or self.node % span == 0

    def source(self, size: int, stride: int) -> str:
        """Where that figure comes from."""
        return self.named["link" if self.inside(size, stride) else "between"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one device sends in one step for one kind of parallelism, and how long that takes at the link's rate."""

    bytes: int
    seconds: float
    formula: str
    source: str = ""


def ring(size: int) -> float:
    """The share of a tensor that each rank sends in one all-gather or one reduce-scatter: (n-1)/n."""
    return (size - 1) / size
