"""How many numbers a sequence's cache has in an engine: whole pages, windows, and layers in groups of equal size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from asbuilt.cost.folded import CacheNumbers
from asbuilt.plan.devices import DeviceStage
from asbuilt.spec.part import Remembered

ENDLESS = 2**62
# Groups are as large as the most common kind where that has less than this many times the layers of the rarest.
NEARLY_EQUAL = Fraction(5, 4)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine stores cached tokens: in pages of `block`; layers with a window keep it, or every token (`whole`).

    With a `chunk` what is reserved for them is the window, that many new tokens, and a page. `grouped` pads the layers
    of each kind to whole groups.
    """

    block: int
    whole: bool = False
    chunk: int | None = None
    grouped: bool = False


def held_numbers(stage: DeviceStage, context: int, layout: Layout) -> CacheNumbers:
    """Returns the cached numbers of one sequence in a stage."""
    key = (context, layout)
    if key not in stage.held:
        if len(stage.held) > 1000:
            stage.held.clear()
        padded = _padding(stage) if layout.grouped else {}
        stage.held[key] = stage.folds.cache_numbers(
            context, lambda r, n: held_tokens(r, n, layout) * padded.get(r.window, 1)
        )
    return stage.held[key]


def _padding(stage: DeviceStage) -> dict[int | None, Fraction]:
    """Returns by window the factor by which groups add layers: 30/29 where 29 layers make six groups of five.

    Layers of different sizes, and beside states, are not grouped.
    """
    layers: dict[int | None, int] = {}
    sizes = set()
    for node in stage.folds.nodes:
        kept = node.own.remembers()
        if kept:
            sizes.add((sum(r.size for r in kept), all(r.grows for r in kept)))
            layers[kept[0].window] = layers.get(kept[0].window, 0) + node.count
    if len(layers) < 2 or len(sizes) > 1:
        return {}
    rarest, most = min(layers.values()), max(layers.values())
    group = most if most < NEARLY_EQUAL * rarest else rarest
    return {window: Fraction(math.ceil(n / group) * group, n) for window, n in layers.items()}


def held_tokens(r: Remembered, tokens: int, layout: Layout) -> int:
    """Returns for how many tokens an engine stores `r`.

    A window of w tokens spans at most ceil((w-1)/block) + 1 pages, the first of which is only partly needed.
    """
    longest = r.tokens_kept(ENDLESS)
    entries = math.ceil(tokens / r.every)
    block = layout.block
    if longest <= 1:  # a state has no pages
        return r.tokens_kept(tokens)
    windowed = longest < ENDLESS // r.every and not layout.whole
    if windowed and layout.chunk is not None:
        reserved = min(longest - 1 + math.ceil(layout.chunk / r.every), entries)
        return reserved if block == 1 else (math.ceil(reserved / block) + 1) * block
    if block == 1:
        return entries if layout.whole else r.tokens_kept(tokens)
    pages = math.ceil(entries / block)
    if windowed:
        pages = min(pages, math.ceil((longest - 1) / block) + 1)
    return pages * block
