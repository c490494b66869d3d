"""The speed of layers that one native call computes: timed on stacks of other sizes, just before the model itself.

seconds of a decode step = start + sum of layers t(bytes) + numbers of the head * seconds of one
seconds of a prefill = start + sum of layers t(tokens, numbers) + the head of one token
t of each mixer and format is interpolated between stacks; a layer of several formats takes of each its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asbuilt.checkpoint.packed import packed_spec
from asbuilt.dtypes import BLOCKS
from asbuilt.kernels.native import INTERLEAVED
from asbuilt.kernels.packed import linear
from asbuilt.measure import timing
from asbuilt.measure.calibrate import DRIFT, LOOKS
from asbuilt.measure.micro import StackMixer, stack
from asbuilt.measure.rates import DTYPES, TimeGrid, lower_quartile
from asbuilt.measure.run import decode_seconds, prefill_seconds
from asbuilt.nn.build import build, interleave
from asbuilt.nn.model import Model
from asbuilt.spec import GatedDeltaNet, Head, TokenEmbedding, weights
from asbuilt.spec import model as spec
from asbuilt.spec.linear import maps_by_path

# Widths of stacks, two of which are timed. For decoding they have as many layers as a near cache does not hold.
WIDTHS, MEMORY, FEW, WORDS = (256, 512, 1024, 2048), 64 * 2**20, 4, 64
PROMPT, STEPS, TOKENS = 64, 24, (64, 512)
# Times are lower quartiles over rounds, as those of the model are: a shared machine is slow for seconds.
ROUNDS = 4
# A head: the row of a product of that many outputs, of a width of its own.
HEAD_ROWS, HEAD_WIDTH, REPEATS = 8192, 1024, 32
# Numbers of a weight by its format; a format is one of blocks, or the dtype of plain numbers.
Held = dict[str, int]


class LayerKind(NamedTuple):
    """What layers are timed apart for: the format of their weights, and their mixer."""

    format: str
    mixer: StackMixer

    def __str__(self) -> str:
        return self.format if self.mixer == "attention" else f"{self.format}, {self.mixer}"


@dataclass(frozen=True)
class StackRates:
    """The seconds of a layer: decoding by its bytes, prefill by tokens and its numbers; and those of a step besides."""

    decode: TimeGrid
    prefill: TimeGrid
    start: float
    bytes_per_number: float


@dataclass(frozen=True)
class Speeds:
    """The rates of layers by their kind, and the seconds of one number of a head by its format."""

    layers: Mapping[LayerKind, StackRates]
    head: Mapping[str, float]

    def document(self) -> dict[str, Any]:
        """Returns them with names for kinds."""
        return {"layers": {str(kind): asdict(rates) for kind, rates in self.layers.items()}, "head": dict(self.head)}


class Stacks:
    """The stacks that a model computing in `dtype` is predicted from, in each format that its layers have."""

    def __init__(self, described: spec.Model, dtype: str) -> None:
        parts = [layer(described, i, dtype) for i in range(len(described.blocks))]
        pair = widths(sum(parts[0].values()))
        with torch.inference_mode():
            self.pairs = {kind: Pair(kind, dtype, pair) for kind in sorted({one for part in parts for one in part})}
        self.head, self.dtype = head(described, dtype), dtype

    def speeds(self) -> Speeds:
        """Returns their speeds now, and those of the head's products."""
        with torch.inference_mode():
            layers = {kind: pair.rates() for kind, pair in self.pairs.items()}
            return Speeds(layers, {format: row_seconds(format, self.dtype) for format in self.head})

    def drift(self) -> float:
        """Returns how many times slower or faster they are than when last timed, after a few rounds at most."""
        with torch.inference_mode():
            return max(pair.drift() for pair in self.pairs.values())


def widths(numbers: int) -> tuple[int, int]:
    """Returns the widths of the two stacks whose layers are nearest to one of so many numbers."""
    sizes = [sum(layer(stack(1, width), 0, "fp32").values()) for width in WIDTHS]
    place = max(0, min(len(WIDTHS) - 2, sum(size <= numbers for size in sizes) - 1))
    return WIDTHS[place], WIDTHS[place + 1]


class Pair:
    """Stacks of two widths of one kind of layer: of few layers, and of many."""

    def __init__(self, kind: LayerKind, dtype: str, widths: tuple[int, int]) -> None:
        self.few = [_built(width, FEW, kind, dtype) for width in widths]
        self.numbers = [sum(layer(one.spec, 0, dtype).values()) for one in self.few]
        self.held = sum(weight.nbytes for weight in self.few[-1].blocks[0].parameters()) / self.numbers[-1]
        self.sizes = [int(count * self.held) for count in self.numbers]
        self.layers = [max(FEW, MEMORY // size) for size in self.sizes]  # fewer may stay in a cache
        self.many = [_built(width, n, kind, dtype) for width, n in zip(widths, self.layers, strict=True)]
        self.times: list[float] = []

    def rates(self) -> StackRates:
        """Returns the rates, timed now."""
        rounds = [self._round() for _ in range(ROUNDS)]
        self.times = [lower_quartile(list(times)) for times in zip(*rounds, strict=True)]
        short, steps, prefills = self.times[0], self.times[1:3], self.times[3:]
        # beside the smaller layers a step's own share is larger
        start = max(0.0, short - FEW * steps[0] / self.layers[0])
        seconds = tuple(max(1e-9, (step - start) / n) for step, n in zip(steps, self.layers, strict=True))
        prefill = TimeGrid((TOKENS, tuple(self.numbers)), tuple(max(1e-9, (one - start) / FEW) for one in prefills))
        return StackRates(TimeGrid((tuple(self.sizes),), seconds), prefill, start, self.held)

    def drift(self) -> float:
        """Returns how many times slower or faster the stacks are than when last timed, after a few rounds at most."""
        rounds, drift = [], float("inf")
        while len(rounds) < LOOKS and drift > DRIFT:
            rounds.append(self._round())
            now = [lower_quartile(list(times)) for times in zip(*rounds, strict=True)]
            drift = max(max(a / b, b / a) for a, b in zip(now, self.times, strict=True))
        return drift

    def _round(self) -> list[float]:
        """Returns the seconds of a step of few layers, of many by width, and of prefills by tokens and width."""
        steps = [decode_seconds(one, PROMPT, STEPS) for one in (self.few[0], *self.many)]
        return steps + [prefill_seconds(one, tokens, 1) for tokens in TOKENS for one in self.few]


def row_seconds(format: str, dtype: str) -> float:
    """Returns the seconds of one number of a large matrix that one row is multiplied by, read from memory."""
    x, pool = torch.ones(1, HEAD_WIDTH, dtype=DTYPES[dtype]), [_matrix(format, dtype)]
    pool += [pool[0].clone() for _ in range(MEMORY // pool[0].nbytes)]
    held = None if format == dtype else format + INTERLEAVED
    times = [timing.seconds(lambda i=i: linear(x, pool[i % len(pool)], format=held)) for i in range(REPEATS)]
    return lower_quartile(times) / (HEAD_ROWS * HEAD_WIDTH)


def _matrix(format: str, dtype: str) -> Tensor:
    if format == dtype:
        return torch.full((HEAD_ROWS, HEAD_WIDTH), 0.01, dtype=DTYPES[dtype])
    block, nbytes = BLOCKS[format]
    return torch.ones(HEAD_ROWS, HEAD_WIDTH // block * nbytes, dtype=torch.uint8)  # equal bytes are interleaved already


def _built(width: int, layers: int, kind: LayerKind, dtype: str) -> Model:
    described, format = stack(layers, width, kind.mixer), kind.format
    assert isinstance(described.embedding, TokenEmbedding)
    assert isinstance(described.head, Head)
    few = {"embedding": replace(described.embedding, n_vocab=WORDS), "head": replace(described.head, n_vocab=WORDS)}
    described = replace(described, **few)
    if format != dtype:
        described = packed_spec(
            described, {path: format for path in maps_by_path(described) if path.startswith("blocks")}
        )
    return _filled(described, dtype)


def _filled(described: spec.Model, dtype: str) -> Model:
    made = build(described, dtype=DTYPES[dtype], seed=None).eval()
    for weight in made.parameters():  # the speed does not depend on the values, unless they are too small to be normal
        weight.fill_(0.01 if weight.is_floating_point() else 1)
    interleave(made)
    return made


def layer(described: spec.Model, i: int, dtype: str) -> dict[LayerKind, int]:
    """Returns how many numbers of matrices block i holds, by format, as of its mixer."""
    mixers = (branch.body for branch in described.blocks[i].branches)
    mixer: StackMixer = "delta_net" if any(isinstance(body, GatedDeltaNet) for body in mixers) else "attention"
    return {LayerKind(format, mixer): n for format, n in _by_format(described, f"blocks.{i}.", dtype).items()}


def head(described: spec.Model, dtype: str) -> Held:
    """Returns the same of the head, or of the table that serves as one."""
    return _by_format(described, "head.", dtype) or _by_format(described, "embedding.", dtype)


def _by_format(described: spec.Model, prefix: str, dtype: str) -> Held:
    found: Counter[str] = Counter()
    for path, weight, _ in weights(described):
        if path.startswith(prefix) and len(weight.shape) == 2:
            found[weight.format or dtype] += weight.size
    return dict(found)


def seconds_here(described: spec.Model, dtype: str, tokens: int) -> tuple[float, float] | None:
    """Returns the seconds of a prefill and of a step, from stacks timed now; None if the layers are no native call."""
    few = replace(described, blocks=tuple(dict.fromkeys(described.blocks)))
    made = build(few, dtype=DTYPES[dtype], seed=None).eval()
    interleave(made)
    if made.native is None:
        return None
    return predicted_seconds(described, dtype, Stacks(described, dtype).speeds(), tokens)


def predicted_seconds(described: spec.Model, dtype: str, known: Speeds, tokens: int) -> tuple[float, float]:
    """Returns the seconds of a prefill of so many tokens, and of a decode step."""
    layers, rates = [layer(described, i, dtype) for i in range(len(described.blocks))], known.layers
    start = max(one.start for one in rates.values())
    last = start + sum(count * known.head[format] for format, count in head(described, dtype).items())
    prefill = sum(_shared(part, {k: rates[k].prefill.at(tokens, sum(part.values())) for k in part}) for part in layers)
    return last + prefill, last + sum(_decoded(part, rates) for part in layers)


def _decoded(part: Mapping[LayerKind, int], rates: Mapping[LayerKind, StackRates]) -> float:
    read = {kind: count * rates[kind].bytes_per_number for kind, count in part.items()}
    nbytes = sum(read.values())
    return _shared(read, {kind: rates[kind].decode.at(nbytes) for kind in part})


def _shared(part: Mapping[LayerKind, float], seconds: Mapping[LayerKind, float]) -> float:
    return sum(share * seconds[kind] for kind, share in part.items()) / sum(part.values())
