"""The speed of layers that one native call computes: timed on stacks of other sizes, just before the model itself.

seconds of a decode step = start + sum of layers and the head, t(bytes)
seconds of a prefill = start + sum of layers, t(tokens, numbers) + the head of one token
t of each format of weights is interpolated between stacks; a layer of several formats takes of each its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from asbuilt.checkpoint.packed import packed_spec
from asbuilt.measure.micro import stack
from asbuilt.measure.rates import DTYPES, TimeGrid
from asbuilt.measure.run import decode_seconds, prefill_seconds
from asbuilt.nn.build import build, interleave
from asbuilt.nn.model import Model
from asbuilt.spec import Head, TokenEmbedding, weights
from asbuilt.spec import model as spec
from asbuilt.spec.linear import maps_by_path

# Widths of the stacks. For decoding they have as many layers as a near cache does not hold; for prefill a few.
WIDTHS, MEMORY, FEW, WORDS = (256, 512, 1024), 96 * 2**20, 4, 64
PROMPT, STEPS, TOKENS, PREFILLS = 64, 24, (64, 512), 2
# Numbers of a weight by its format; a format is one of blocks, or the dtype of plain numbers.
Held = dict[str, int]


@dataclass(frozen=True)
class StackRates:
    """The seconds of a layer: decoding by its bytes, prefill by tokens and its numbers; and those of a step besides."""

    decode: TimeGrid
    prefill: TimeGrid
    start: float
    bytes_per_number: float


def measured(format: str, dtype: str) -> StackRates:
    """Returns the rates of weights in one format, a block format or `dtype`, the model computing in `dtype`."""
    sizes, seconds, prefills, numbers, held, start = [], [], [], [], 1.0, 0.0
    for width in WIDTHS:
        few = _built(width, FEW, format, dtype)
        numbers.append(sum(layer(few.spec, 0, dtype).values()))
        held = sum(weight.nbytes for weight in few.blocks[0].parameters()) / numbers[-1]
        sizes.append(int(numbers[-1] * held))
        prefills.append([prefill_seconds(few, tokens, PREFILLS) for tokens in TOKENS])
        layers = max(FEW, MEMORY // sizes[-1])  # fewer may stay in a cache, and tell nothing of many
        many = decode_seconds(_built(width, layers, format, dtype), PROMPT, STEPS)
        if not seconds:  # beside the smallest layers a step's own share is the largest
            start = max(0.0, decode_seconds(few, PROMPT, STEPS) - FEW * many / layers)
        seconds.append(max(1e-9, (many - start) / layers))
    each = [max(1e-9, (row[i] - start) / FEW) for i in range(len(TOKENS)) for row in prefills]
    return StackRates(
        TimeGrid((tuple(sizes),), tuple(max(1e-9, one) for one in seconds)),
        TimeGrid((TOKENS, tuple(numbers)), tuple(each)),
        start,
        held,
    )


def _built(width: int, layers: int, format: str, dtype: str) -> Model:
    described = stack(layers, width)
    assert isinstance(described.embedding, TokenEmbedding)
    assert isinstance(described.head, Head)
    few = {"embedding": replace(described.embedding, n_vocab=WORDS), "head": replace(described.head, n_vocab=WORDS)}
    described = replace(described, **few)
    if format != dtype:
        described = packed_spec(
            described, {path: format for path in maps_by_path(described) if path.startswith("blocks")}
        )
    made = build(described, dtype=DTYPES[dtype], seed=None).eval()
    for weight in made.parameters():  # the speed does not depend on the values, unless they are too small to be normal
        weight.fill_(0.01 if weight.is_floating_point() else 1)
    interleave(made)
    return made


def layer(described: spec.Model, i: int, dtype: str) -> Held:
    """Returns how many numbers of matrices block i holds, by format."""
    return _by_format(described, f"blocks.{i}.", dtype)


def head(described: spec.Model, dtype: str) -> Held:
    """Returns the same of the head, or of the table that serves as one."""
    return _by_format(described, "head.", dtype) or _by_format(described, "embedding.", dtype)


def _by_format(described: spec.Model, prefix: str, dtype: str) -> Held:
    found: Counter[str] = Counter()
    for path, weight, _ in weights(described):
        if path.startswith(prefix) and len(weight.shape) == 2:
            found[weight.format or dtype] += weight.size
    return dict(found)


def formats(described: spec.Model, dtype: str) -> set[str]:
    """Returns the formats of the matrices of all layers and the head."""
    parts = [layer(described, i, dtype) for i in range(len(described.blocks))]
    return {format for part in (*parts, head(described, dtype)) for format in part}


def predicted_seconds(
    described: spec.Model, dtype: str, rates: Mapping[str, StackRates], tokens: int
) -> tuple[float, float]:
    """Returns the seconds of a prefill of so many tokens, and of a decode step."""
    layers = [layer(described, i, dtype) for i in range(len(described.blocks))]
    start = max(rates[format].start for format in rates)
    last = start + _decoded(head(described, dtype), rates)
    prefill = sum(_shared(part, {f: rates[f].prefill.at(tokens, sum(part.values())) for f in part}) for part in layers)
    return last + prefill, last + sum(_decoded(part, rates) for part in layers)


def _decoded(part: Held, rates: Mapping[str, StackRates]) -> float:
    nbytes = sum(count * rates[format].bytes_per_number for format, count in part.items())
    weighed = {format: count * rates[format].bytes_per_number for format, count in part.items()}
    return _shared(weighed, {format: _read(rates[format].decode, nbytes) for format in part})


def _read(table: TimeGrid, nbytes: float) -> float:
    """Beyond the largest layer all is read from memory, at its speed."""
    largest = table.axes[0][-1]
    return table.at(min(nbytes, largest)) * max(1.0, nbytes / largest)


def _shared(part: Mapping[str, float], seconds: Mapping[str, float]) -> float:
    return sum(share * seconds[format] for format, share in part.items()) / sum(part.values())
