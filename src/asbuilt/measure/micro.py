"""Micro-benchmarks of library calls, and of Python's overhead between them.

Products and attention are timed on a grid of sizes that belong to no model, in rotation, with operands read from
memory. Small calls are timed between products that read whole matrices: with the CPU's caches full of weights they take
several times as long as in a loop of their own. Python's overhead is the time of a stack of the most common parts, in
sizes of its own, minus the time of its calls. Times are lower quartiles, as the measured ones are, since a shared
machine is slowed down much of the time.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.rows import linear, row_products
from asbuilt.measure import timing
from asbuilt.measure.rates import DTYPES, Calibration, LinearTime, Rates, TimeGrid, lower_quartile
from asbuilt.measure.run import decode_seconds, prefill_seconds
from asbuilt.measure.trace import trace
from asbuilt.nn import build
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedDeltaNet,
    GatedMLP,
    Head,
    Model,
    Part,
    RMSNorm,
    Rotary,
    ShortConvolution,
    TokenEmbedding,
)

# Rounds, in each of which every call of a grid is made once.
DECODE_ROUNDS, PREFILL_ROUNDS, SMALL_ROUNDS = 41, 11, 200
# Of the probe stack: cached tokens, timed steps, and timed prefills of as many tokens.
PROBE_PROMPT, PROBE_STEPS, PROBE_PREFILLS = 64, 32, 5
KINDS = "decode", "prefill", "product"  # what a probe times in each dtype, besides reading memory
# (layers, width) of the stacks whose steps are timed, from one that fits in cache to one that is read from memory.
STACKS, STACK_STEPS = ((12, 256), (16, 512), (20, 768)), 16
LEAST = 0.1  # the least fraction of a time that subtractions leave, since clocks and other processes add noise
# Operands come in sequence from this many bytes: more than a process gets of most CPUs' caches.
MEMORY = 300 * 2**20
NUMBERS = 768, 2**20  # sizes at which elementwise operations are timed
ROW = 512  # numbers in one row of a softmax
# (outputs, inputs); (rows, inputs, outputs); (heads, tokens, width); (heads of the cache, cached tokens, width)
VECTOR = ((256, 1024, 4096, 32768), (128, 512, 2048))
MATRIX = ((2, 16, 128, 512), (128, 512, 2048), (128, 1024, 4096))
ATTENTION = ((1, 2, 4, 16), (32, 128, 512), (32, 64, 128))
ATTENTION_READ = ((1, 4, 16), (16, 256, 2048), (32, 128))
GRIDS = {"vector": VECTOR, "matrix": MATRIX, "attention": ATTENTION, "attention_read": ATTENTION_READ}

StackMixer = Literal["attention", "delta_net"]  # of stacks
Work = Callable[[], object]
# The first of each is timed on large tensors too.
LINES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "view": (lambda x: x.view(-1, 8), lambda x: x.unsqueeze(0), lambda x: x[:4]),
    "arithmetic": (lambda x: x * x, lambda x: x + x, lambda x: x.roll(8, -1), lambda x: x * 0.5),
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"),),
    "tanh": (torch.tanh,),
    "sigmoid": (torch.sigmoid,),
    "exp": (torch.exp, torch.rsqrt),
    "softmax": (lambda x: x.softmax(-1),),
    "sin": (torch.sin,),
}


class _Memory:
    """Tensors from a block that is cycled through from end to end, so that none is in a near cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.block, self.end = torch.ones(MEMORY // dtype.itemsize, dtype=dtype), 0

    def take(self, *shape: int) -> Tensor:
        """Returns the next tensor of this shape, filled with ones."""
        size = math.prod(shape)
        self.end = size if self.end + size > len(self.block) else self.end + size
        return self.block[self.end - size : self.end].view(shape)


Prepare = Callable[[_Memory], Work]


def measured(machine: Mapping[str, str | int | float]) -> Calibration:
    """Returns the calibration of the machine at hand, which `machine` identifies."""
    others, probe = timing.Others(), Probe()
    looks, rates = [probe()], {}
    for name, dtype in DTYPES.items():
        found = _rates(dtype)  # the memory of its operands is free again
        rates[name] = replace(found, between=_between(found, dtype))
        looks.append(probe())
    # an idle machine may be fast for seconds, and other processes slow it for as long: take the median of each
    probes = {name: statistics.median(look[name] for look in looks) for name in looks[0]}
    read = MEMORY / probes["reading"]
    return Calibration(dict(machine), read_bandwidth=read, rates=rates, probes=probes, others=others.share())


class Probe:
    """A callable that returns the seconds of reading memory, and in each dtype of a stack's decode step and prefill and
    of a large product, whose execution units other processes may share while small ones hardly use them.

    They tell how fast the machine is: probed at calibration, and again before the calibration is used.
    """

    def __init__(self) -> None:
        self.memory = _Memory(torch.float32)
        self.models = {name: build(stack(), dtype=dtype).eval() for name, dtype in DTYPES.items()}
        rows, inside, out = (axis[-1] for axis in MATRIX)
        self.products = {
            name: (torch.ones(rows, inside, dtype=dtype), torch.ones(out, inside, dtype=dtype))
            for name, dtype in DTYPES.items()
        }

    def __call__(self) -> dict[str, float]:
        """Takes a second or two."""
        (reading,) = _in_turn([lambda memory: memory.block.sum], self.memory, PREFILL_ROUNDS)
        found = {"reading": reading}
        for name, model in self.models.items():
            found[f"{name} decode"] = decode_seconds(model, PROBE_PROMPT, PROBE_STEPS)
            found[f"{name} prefill"] = prefill_seconds(model, PROBE_PROMPT, PROBE_PREFILLS)
            product = partial(linear, *self.products[name])
            found[f"{name} product"] = lower_quartile([timing.seconds(product) for _ in range(PROBE_PREFILLS + 1)][1:])
        return found


def _in_turn(calls: Sequence[Prepare], memory: _Memory, rounds: int, before: Prepare | None = None) -> list[float]:
    """Returns each call's time, made once per round, after the untimed call `before` if given."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, kept in zip(calls, times, strict=True):
            work = call(memory)
            if before is not None:
                before(memory)()
            kept.append(timing.seconds(work))
    return [lower_quartile(kept[1:]) for kept in times]


def stack(layers: int = 12, width: int = 256, mixer: StackMixer = "attention") -> Model:
    """Returns a small model of the most common parts, so that products take the smaller share of its time."""
    heads, norm = width // 64, RMSNorm(d=width)
    body: Part = Attention(
        d_model=width, n_heads=heads, n_kv_heads=heads // 2, d_head=64, positions=Rotary(d_rotary=64)
    )
    if mixer == "delta_net":
        body = GatedDeltaNet(
            d_model=width,
            n_key_heads=heads,
            n_value_heads=heads,
            d_key=128,
            d_value=128,
            conv=ShortConvolution(channels=3 * heads * 128, kernel=4),
            norm=RMSNorm(d=128),
        )
    ffn = GatedMLP(d_model=width, d_ff=3 * width, activation="silu")
    branches = Branch(name=mixer, norm=norm, body=body), Branch(name="ffn", norm=norm, body=ffn)
    return Model(
        embedding=TokenEmbedding(n_vocab=8 * width, d_model=width),
        blocks=(Block(branches=branches),) * layers,
        norm=norm,
        head=Head(d_model=width, n_vocab=8 * width),
        max_positions=PROBE_PROMPT + PROBE_STEPS,
    )


def _between(rates: Rates, dtype: torch.dtype) -> TimeGrid:
    """Returns how many times longer small calls take within the step of each stack than alone."""
    found = {}
    for layers, width in STACKS:
        model = build(stack(layers, width), dtype=dtype).eval()
        step = trace(model.spec, tokens=1, past=PROBE_PROMPT + STACK_STEPS // 2, dtype=dtype)
        rest = decode_seconds(model, PROBE_PROMPT, STACK_STEPS) - step.work(rates)
        found[int(step.matrices)] = max(LEAST, rest / step.starts(rates))
    return TimeGrid((tuple(found),), tuple(found.values()))


def _rates(dtype: torch.dtype) -> Rates:
    memory = _Memory(dtype)
    few, many = NUMBERS
    rows = [_matrix(1, inside, out) for out, inside in itertools.product(*VECTOR)]
    reads = [_attention_read(*sizes) for sizes in itertools.product(*ATTENTION_READ)]
    before = _matrix(1, 768, 1024)
    with row_products(dtype, torch.device("cpu"), 1):
        row, read = (_in_turn(calls, memory, DECODE_ROUNDS, before) for calls in (rows, reads))
        calls = [_one_after_another(memory.take(few), works) for works in LINES.values()]
        starts = _in_turn(calls, memory, SMALL_ROUNDS, before)
    before = _matrix(64, 512, 512)
    product, attention, rates = (
        _in_turn(calls, memory, PREFILL_ROUNDS, before)
        for calls in (
            [_matrix(*sizes) for sizes in itertools.product(*MATRIX)],
            [_attention(*sizes) for sizes in itertools.product(*ATTENTION)],
            [_just_written((many // ROW, ROW), works[0]) for works in LINES.values()],
        )
    )
    moved = 2 * many * dtype.itemsize
    lines = {}
    for (name, works), few_seconds, seconds in zip(LINES.items(), starts, rates, strict=True):
        start = few_seconds / len(works)
        lines[name] = LinearTime(start=start, rate=moved / max(seconds - start, LEAST * seconds))
    return Rates(
        vector=TimeGrid(VECTOR, tuple(row)),
        matrix=TimeGrid(MATRIX, tuple(product)),
        attention=TimeGrid(ATTENTION, tuple(attention)),
        attention_read=TimeGrid(ATTENTION_READ, tuple(read)),
        lines=lines,
        between=TimeGrid(((1, 2),), (1.0, 1.0)),  # measured below
        product_rate=2 * math.prod(axis[-1] for axis in MATRIX) / product[-1],
        row_rate=math.prod(axis[-1] for axis in VECTOR) * dtype.itemsize / row[-1],
    )


def _one_after_another(x: Tensor, works: Sequence[Callable[[Tensor], object]]) -> Prepare:
    """Uses the same tensor each time: a small call works on what has just been written."""
    return lambda memory: lambda: [work(x) for work in works]


def _just_written(shape: tuple[int, int], work: Callable[[Tensor], object]) -> Prepare:
    """Works on the output of a product, as in a model: reading it from memory could be five times slower."""
    rows, columns = shape

    def prepare(memory: _Memory) -> Work:
        x = linear(memory.take(rows, columns), memory.take(columns, columns)).div_(columns)
        return lambda: work(x)

    return prepare


def _matrix(rows: int, inside: int, out: int) -> Prepare:
    def prepare(memory: _Memory) -> Work:
        x, weight = memory.take(rows, inside), memory.take(out, inside)
        return lambda: linear(x, weight)

    return prepare


def _attention(heads: int, tokens: int, width: int) -> Prepare:
    def prepare(memory: _Memory) -> Work:
        q, k, v = (memory.take(1, heads, tokens, width) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return prepare


def _attention_read(heads: int, keys: int, width: int) -> Prepare:
    """Three queries per head of the cache, as in grouped-query attention."""

    def prepare(memory: _Memory) -> Work:
        q, k, v = (memory.take(1, heads, tokens, width) for tokens in (3, keys, keys))
        return lambda: F.scaled_dot_product_attention(q, k, v)

    return prepare
