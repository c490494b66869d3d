"""Whole documents of four unlike models, each figure reckoned a second time: sparse, windowed, latent, encoder-decoder.

What is expected is arithmetic over the sizes that stand below, by the published formulas; limits are found by trying
every number. Nothing of asbuilt.cost or asbuilt.plan takes part in it. All models have a vocabulary of 500 and a width
of 32, are held in bf16, and (but for the latent one) attend with 4 heads of 10 over 2 key/value heads: maps of 1,280,
640, 640 and 1,280 numbers, 40 cached numbers a token, and 160 FLOPs a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from formulas import worked_out

from asbuilt.catalog import machines
from asbuilt.catalog.machine import Machine
from asbuilt.plan import Conventions, serve
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    CrossAttention,
    GatedMLP,
    Head,
    LatentAttention,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    SharedEmbedding,
    TextEncoder,
    TiedHead,
    TokenEmbedding,
)

LONGEST, PAGE = 256, 16
# bytes of weights, of rows looked up and of caches; FLOPs of products, and of scores with masked pairs skipped
Kinds = dict[str, tuple[float, float, float, float, float]]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """`stored` bytes; `run(b, t, p)` of b sequences of t tokens after p; `cached` numbers, by tokens kept."""

    spec: Model
    stored: dict[str, int]
    run: Callable[[int, int, int], Kinds]
    cached: Callable[[Callable[[int | None], int]], int]
    activations: Callable[[int, int], int]


def pairs(t: int, p: int, window: int | None = None) -> int:
    return sum(min(p + i, window or p + i) for i in range(1, t + 1))


def blocks(*bodies: Any) -> Block:  # noqa: ANN401
    return Block(branches=tuple(Branch(name=f"b{i}", norm=RMSNorm(d=32), body=body) for i, body in enumerate(bodies)))


def stack(name: str, layers: tuple[Block, ...], **more: Any) -> Model:  # noqa: ANN401
    more = {"head": Head(d_model=32, n_vocab=500)} | more
    return Model(
        name=name,
        embedding=TokenEmbedding(n_vocab=500, d_model=32),
        blocks=layers,
        norm=RMSNorm(d=32),
        max_positions=LONGEST,
        **more,
    )


ATTENTION = Attention(d_model=32, n_heads=4, n_kv_heads=2, d_head=10, positions=Rotary(d_rotary=10))
GATED = GatedMLP(d_model=32, d_ff=48, activation="silu")


def sparse() -> Toy:
    """A dense layer of SwiGLU 48, then three of 6 experts of 20, two of them a token's, and a shared one of 28."""
    experts = MixtureOfExperts(
        d_model=32,
        d_ff=20,
        n_experts=6,
        activation="silu",
        router=Router(d_model=32, n_experts=6, top_k=2),
        shared=GatedMLP(d_model=32, d_ff=28, activation="silu"),
    )
    spec = stack("sparse", (blocks(ATTENTION, GATED), *[blocks(ATTENTION, experts)] * 3))

    def run(b: int, t: int, p: int) -> Kinds:
        rows = b * t
        hit = math.ceil(7_680 * (1 - Fraction(4, 6) ** rows))  # bytes of a stack of 6 x 20 x 32: 3 in each of 3 layers
        ffn = rows * 2 * (3 * 48 * 32 + 3 * (2 * 3 * 20 * 32 + 3 * 28 * 32))
        return {
            "embedding": (0, rows * 64, 0, 0, 0),
            "attention": (4 * 7_680, 0, b * 4 * 40 * (p + t) * 2, rows * 4 * 7_680, b * 4 * 160 * pairs(t, p)),
            "ffn": (9_216 + 3 * 5_376 + 9 * hit, 0, 0, ffn, 0),
            "router": (1_152, 0, 0, rows * 1_152, 0),
            "norm": (576, 0, 0, 0, 0),
            "head": (32_000, 0, 0, b * 32_000, 0),
        }

    return Toy(
        spec=spec,
        stored={"embedding": 32_000, "attention": 30_720, "ffn": 94_464, "router": 1_152, "norm": 576, "head": 32_000},
        run=run,
        cached=lambda kept: 4 * 40 * kept(None),
        # attention's, as those of `windowed`: more than positions 8 t, cos and sin 40 t, the stream, the block's input
        # and that normed 3 x 64 t, the experts' result 64 t, and of 2 t rows places, order and weights 52 t, and the
        # workspaces of fused experts 2 x (32 + 40) x 2 t, in all 644 t
        activations=lambda t, p: 696 * t,
    )


def windowed() -> Toy:
    """Two layers of a window of 24 with sinks, two of all tokens with capped scores; plain MLPs of 48; a tied head."""
    near = Attention(
        d_model=32, n_heads=4, n_kv_heads=2, d_head=10, positions=Rotary(d_rotary=10), window=24, sinks=True
    )
    far = Attention(d_model=32, n_heads=4, n_kv_heads=2, d_head=10, positions=Rotary(d_rotary=10), softcap=30.0)
    mlp = MLP(d_model=32, d_ff=48, activation="gelu")
    spec = stack("windowed", (blocks(near, mlp), blocks(far, mlp)) * 2, head=TiedHead(d_model=32, n_vocab=500))

    def run(b: int, t: int, p: int) -> Kinds:
        rows, seen = b * t, p + t
        scores = b * 160 * 2 * (pairs(t, p) + pairs(t, p, 24))
        return {
            "embedding": (0, rows * 64, 0, 0, 0),
            "attention": (30_736, 0, b * 2 * 40 * (seen + min(seen, 24)) * 2, rows * 4 * 7_680, scores),
            "ffn": (24_576, 0, 0, rows * 24_576, 0),
            "norm": (576, 0, 0, 0, 0),
            "head": (32_000, 0, 0, b * 32_000, 0),
        }

    return Toy(
        spec=spec,
        stored={"embedding": 32_000, "attention": 30_736, "ffn": 24_576, "norm": 576, "head": 0},
        run=run,
        cached=lambda kept: 2 * 40 * (kept(None) + kept(24)),
        activations=lambda t, p: 696 * t,
    )


def latent() -> Toy:
    """Three layers of 4 heads over latents of 12 and a turned key of 6; queries and keys of 10 + 6, values of 8.

    Maps: q 64 x 32, down 12 x 32, key 6 x 32, up 40 x 12 and 32 x 12, o 32 x 32: 4,512 numbers. A new token alone is
    attended in the latents' space, 4 x 2 x (18 + 12) FLOPs a pair; a chunk expands all latents, 4 x 2 x (16 + 8).
    """
    attention = LatentAttention(
        d_model=32,
        n_heads=4,
        kv_rank=12,
        d_nope=10,
        d_rope=6,
        d_value=8,
        kv_norm=RMSNorm(d=12),
        positions=Rotary(d_rotary=6),
    )
    spec = stack("latent", (blocks(attention, GATED),) * 3)

    def run(b: int, t: int, p: int) -> Kinds:
        rows, seen = b * t, b * (p + t)
        alone = t == 1 and p > 0
        products = rows * 2 * 4_512 if alone else rows * 2 * 3_648 + seen * 2 * 864
        scores = b * (240 if alone else 192) * pairs(t, p)
        return {
            "embedding": (0, rows * 64, 0, 0, 0),
            "attention": (27_072, 0, 3 * 18 * seen * 2, 3 * products, 3 * scores),
            "ffn": (27_648, 0, 0, rows * 27_648, 0),
            "norm": (520, 0, 0, 0, 0),
            "head": (32_000, 0, 0, b * 32_000, 0),
        }

    def activations(t: int, p: int) -> int:
        # positions, cos and sin; the stream, and normed; queries and latents are kept; keys, values, and values filled
        # up to the keys' width are there for all tokens (24 + 16 numbers of 4 heads), and what comes out with its sums
        attending = 164 * t + 320 * (p + t) + 144 * t
        gated = 2 * t * (3 * 48 + 32)
        return 8 * t + 24 * t + 64 * t + 64 * t + max(340 * t, attending, gated + 64 * t)

    return Toy(
        spec=spec,
        # three layers of two norms of 32 and one of 12, and the last
        stored={"embedding": 32_000, "attention": 27_072, "ffn": 27_648, "norm": 520, "head": 32_000},
        run=run,
        cached=lambda kept: 3 * 18 * kept(None),
        activations=activations,
    )


def both_sides() -> Toy:
    """An encoder of two layers, a decoder of three with 4 heads of 10 that look at it; it reads as it writes."""
    own = Attention(d_model=32, n_heads=4, n_kv_heads=2, d_head=10)
    around = Attention(d_model=32, n_heads=4, n_kv_heads=2, d_head=10, causal=False)
    cross = CrossAttention(d_model=32, d_source=32, n_heads=4, d_head=10)
    mlp = MLP(d_model=32, d_ff=48, activation="relu")
    encoder = TextEncoder(
        embedding=SharedEmbedding(n_vocab=500, d_model=32),
        blocks=(blocks(around, mlp),) * 2,
        norm=RMSNorm(d=32),
        max_positions=LONGEST,
    )
    spec = stack("both sides", (blocks(own, cross, mlp),) * 3, encoder=encoder)

    def run(b: int, t: int, p: int) -> Kinds:
        rows, seen = b * t, p + t
        first = p == 0  # then the source is read, and its keys and values are made
        weights = 3 * (7_680 + 5_120) + first * (3 * 5_120 + 2 * 7_680)
        cache = b * 3 * (40 + 80) * seen * 2
        products = rows * 3 * (7_680 + 5_120) + first * rows * (3 * 5_120 + 2 * 7_680)
        scores = b * 160 * (3 * pairs(t, p) + 3 * t * seen + first * 2 * t * t)
        return {
            "embedding": (0, rows * 64, 0, 0, 0),
            "attention": (weights, 0, cache, products, scores),
            "ffn": ((3 + 2 * first) * 6_144, 0, 0, rows * (3 + 2 * first) * 6_144, 0),
            "norm": (640 + first * 320, 0, 0, 0, 0),
            "head": (32_000, 0, 0, b * 32_000, 0),
        }

    def activations(t: int, p: int) -> int:
        """Positions and the stream; normed, what came in, queries, keys and values of the source, mixed, the result."""
        looking = 8 * t + 64 * t + 64 * t + 64 * t + 80 * t + 160 * (p + t) + 80 * t + 64 * t
        return looking + (64 * t if p == 0 else 0)  # what the encoder made stays

    return Toy(
        spec=spec,
        # three layers of 7,680 + 10,240 bytes, two of 7,680 numbers; 5 MLPs; 3 x 3 + 1 and 2 x 2 + 1 norms
        stored={
            "embedding": 32_000,
            "attention": 2 * (3 * (3_840 + 5_120) + 2 * 3_840),
            "ffn": 5 * 6_144,
            "norm": 960,
            "head": 32_000,
        },
        run=run,
        cached=lambda kept: 3 * (40 + 80) * kept(None),
        activations=activations,
    )


@dataclass(frozen=True, kw_only=True)
class Reckoning:
    """The answers by plain arithmetic; on one device of `memory` bytes, `bandwidth` bytes/s and `rate` FLOP/s."""

    toy: Toy
    memory: int
    bandwidth: float
    rate: float
    chunk: int
    workspace: int
    latency: float | None

    @property
    def left(self) -> int:
        """Of the memory, nine tenths less the weights and the workspace."""
        return self.memory - math.ceil(self.memory * (1 - 0.9)) - sum(self.toy.stored.values()) - self.workspace

    def activations(self, n: int) -> int:
        t = min(self.chunk, n)
        return max(self.toy.activations(t, 0), self.toy.activations(t, n - t))

    def cache(self, n: int) -> int:
        def pages(window: int | None) -> int:
            most = math.ceil(n / PAGE)
            return PAGE * (most if window is None else min(most, math.ceil((window - 1) / PAGE) + 1))

        return 2 * self.toy.cached(pages)

    def room(self, n: int) -> int:
        return max(0, self.left - self.activations(n)) // (self.cache(n) + 5_000)  # 500 x (2 + 4 + 4) bytes of logits

    def users(self, n: int) -> int:
        most = self.room(n)
        return most if self.latency is None else max((u for u in range(most + 1) if self.in_time(u, n)), default=0)

    def in_time(self, users: int, n: int) -> bool:
        return self.latency is None or users == 0 or self.step(users, n)["seconds_per_step"] <= self.latency

    def seconds(self, kinds: Kinds) -> dict[str, tuple[float, float]]:
        return {k: ((w + r + c) / self.bandwidth, (p + s) / self.rate) for k, (w, r, c, p, s) in kinds.items()}

    def step(self, users: int, n: int) -> dict[str, Any]:
        roofs = self.seconds(self.toy.run(users, 1, n - 1)).values()
        seconds, reading, computing = sum(map(max, roofs)), sum(m for m, _ in roofs), sum(c for _, c in roofs)
        return {
            "batch": users,
            "seconds_per_step": seconds,
            "overlapped_seconds": max(reading, computing),
            "tokens_per_second": users / seconds,
            "tokens_per_second_per_user": 1 / seconds,
            "memory_tokens_per_second": users / reading,
            "compute_tokens_per_second": users / computing,
            "bound": "memory" if reading >= computing else "compute",
        }

    def made_of(self, kinds: Kinds, rows: int) -> dict[str, Any]:
        roofs = self.seconds(kinds).values()
        return {
            "memory_seconds": sum(m for m, _ in roofs),
            "compute_seconds": sum(c for _, c in roofs),
            "link_seconds": 0,
            "rows": rows,
            "times": 1,
        }

    def prompt(self, n: int) -> dict[str, Any]:
        parts = [self.seconds(self.toy.run(1, min(self.chunk, n - p), p)) for p in range(0, n, self.chunk)]
        reading, computing = (sum(roofs[i] for part in parts for roofs in part.values()) for i in (0, 1))
        return {
            "prompt": n,
            "seconds": sum(max(roofs) for part in parts for roofs in part.values()),
            "bound": "memory" if reading >= computing else "compute",
            "memory_seconds": reading,
            "compute_seconds": computing,
            "link_seconds": 0,
            "rows": n,
            "times": 1,
        }

    def components(self, users: int, n: int) -> dict[str, dict[str, Any]]:
        found, kinds = {}, self.toy.run(users, 1, n - 1)
        for kind, (reading, computing) in self.seconds(kinds).items():
            weights, lookups, cache, products, scores = kinds[kind]
            found[kind] = {
                "kind": kind,
                "where": "device",
                "stored": self.toy.stored[kind],
                "weights": weights,
                "lookups": lookups,
                "cache": cache,
                "products": products,
                "scores": scores,
                "memory_seconds": reading,
                "compute_seconds": computing,
                "moved": weights + lookups + cache,
                "flops": products + scores,
                "flops_per_token": (products + scores) / users,
                "seconds": max(reading, computing),
                "bound": "memory" if reading >= computing else "compute",
            }
        return found

    def knee(self, n: int) -> int | None:
        bound = (u for u in range(1, 5000) if self.step(u, n)["bound"] == "compute")
        return next(bound, None)

    def document(self, n: int, asked: int | None) -> dict[str, Any]:
        most, wanted = self.users(n), asked or 1
        batch = asked or max(1, most)
        logits, activations = 5_000 * batch if asked or most else 0, self.activations(n)
        budget = self.left - activations - logits
        step = self.step(batch, n)
        return {
            "model": self.toy.spec.name,
            "machine": "small",
            "disaggregated": None,
            "offload": None,
            "lora": None,
            "experts": None,
            "kv_host": None,
            "layout": {"gpus": 1, "tp": 1, "pp": 1, "ep": 1, "replicas": 1, "redundant_experts": 0},
            "dtype": "bf16",
            "kv_dtype": "bf16",
            "context": n,
            "fits": most >= wanted,
            "weight_bytes": sum(self.toy.stored.values()),
            "kv_budget_bytes": max(0, budget),
            "cache_tokens": max(0, budget) * n // self.cache(n),
            "users": most,
            "users_that_fit": self.room(n),
            "largest_context": max(
                (c for c in range(1, LONGEST + 1) if self.room(c) >= wanted and self.in_time(wanted, c)), default=0
            ),
            "largest_batch": most,
            "cache_bytes": {
                "minimum": 2 * self.toy.cached(lambda window: min(n, window or n)),
                "object": 2 * self.toy.cached(lambda window: min(n, window or n)),
                "paged": self.cache(n),
            },
            "prefill": self.prompt(n),
            "decode": step | self.made_of(self.toy.run(batch, 1, n - 1), batch),
            "sweep": [self.step(2**i, n) for i in range(11)],
            "knee": self.knee(n),
            "targets": {} if self.latency is None else {"time per token": step["seconds_per_step"] <= self.latency},
            "efficiency": {"bandwidth": 1.0, "compute": 1.0},
            "warnings": [],
            "refused": [],
        }

    def ladder(self, n: int, asked: int | None) -> dict[str, int]:
        batch = asked or self.users(n)
        lines = {
            "device memory": self.memory,
            "reserve": math.ceil(self.memory * (1 - 0.9)),
            "weights": sum(self.toy.stored.values()),
            "activations": self.activations(n),
            "logits and sampler": 5_000 * batch,
            "graphs and workspace": self.workspace,
        }
        return lines | {"cache budget": 2 * self.memory - sum(lines.values())}


# context, users, seconds of a token
QUESTIONS = [(100, None, None), (100, 7, None), (33, None, 0.0006), (256, 20, 0.0004), (31, 10_000, None)]


@pytest.mark.parametrize(("context", "users", "latency"), QUESTIONS)
@pytest.mark.parametrize("toy", [sparse, windowed, latent, both_sides], ids=lambda toy: toy.__name__)
def test_whole_documents(toy: Callable[[], Toy], context: int, users: int | None, latency: float | None) -> None:
    machine = Machine(name="small", memory_gb=0.003, bandwidth=1e9, rates={"bf16": 8e9})
    reckoned = Reckoning(
        toy=toy(), memory=3_000_000, bandwidth=1e9, rate=8e9, chunk=32, workspace=40_000, latency=latency
    )
    plan = serve(
        reckoned.toy.spec,
        machine,
        context=context,
        prompt=context,
        chunk=32,
        users=users,
        latency_target=latency,
        conventions=Conventions(workspace=40_000, targets="minimum"),
    )
    found = plan.document()
    assert {line["line"]: line["bytes"] for line in found.pop("ladder")} == reckoned.ladder(context, users)
    batch = found["decode"]["batch"]
    components = {c["kind"]: c for c in found.pop("components")}
    assert components == approximately(reckoned.components(batch, context))
    expected = reckoned.document(context, users)
    assert found["smallest_count"] == (1 if expected["fits"] else found["smallest_count"])
    smallest = min(
        (m for m in machines.MACHINES.values() if m.kind == "accelerator"),
        key=lambda m: (m.memory_bytes(), -m.bandwidth),
    )
    if latency is None:
        assert found["smallest_card"] == smallest.name  # any has room for these
    asked, first = found.pop("asked"), found.pop("by_format")[0]
    assert (asked["users"], asked["prompt"], asked["latency_target"]) == (users, context, latency)
    assert found.pop("figures")["memory_bytes"] == 3_000_000
    assert (found.pop("workload"), found.pop("cost")) == (None, None)
    assert first["weight_bytes"] == found["weight_bytes"]
    assert first["users"] == (found["users_that_fit"],) * len(first["users"])
    for key in (
        *("smallest_card", "smallest_count", "suggestions", "alternatives", "conventions", "engine", "expected"),
        "version",
    ):
        found.pop(key)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == approximately(value), key


def approximately(value: Any) -> Any:  # noqa: ANN401
    """Floats to ten digits, all else exactly, inside lists and dictionaries too."""
    if isinstance(value, dict):
        return {key: approximately(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [approximately(inner) for inner in value]
    return pytest.approx(value, rel=1e-10) if isinstance(value, float) else value


@pytest.mark.parametrize("toy", [sparse, windowed, latent, both_sides], ids=lambda toy: toy.__name__)
def test_derivations_of_prompts_in_which_either_binds(toy: Callable[[], Toy]) -> None:
    """Of 100 tokens the first chunks take FLOPs and the last one of 4 bytes: each line's formula gives its seconds."""
    machine = Machine(name="small", memory_gb=0.003, bandwidth=1e9, rates={"bf16": 8e9})
    plan = serve(
        toy().spec,
        machine,
        context=100,
        prompt=100,
        chunk=32,
        conventions=Conventions(workspace=40_000, targets="minimum"),
    )
    mixed = [line for line in plan.lines if "memory-bound chunks" in line.note]
    assert mixed
    for line in plan.lines:
        assert worked_out(line) == pytest.approx(line.value, rel=1e-9), line
