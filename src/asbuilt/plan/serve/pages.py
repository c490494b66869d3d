"""What a sequence's cache takes in an engine: whole pages, windows, layers in groups of equal size, pages of states."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from asbuilt.cost.folded import CacheNumbers
from asbuilt.plan.devices import DeviceStage
from asbuilt.spec.part import CacheFormat, Remembered

ENDLESS = 2**62
# The kind of layers that keep a state, beside windows of tokens.
STATE = -1
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

    Layers of different sizes are not grouped; `with_states` are those beside states.
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
    group = _group(layers.values())
    return {window: Fraction(math.ceil(n / group) * group, n) for window, n in layers.items()}


def _group(layers: Collection[int]) -> int:
    """Returns how many layers a group has: as many as the rarest kind, or the most common one if nearly as rare."""
    rarest, most = min(layers), max(layers)
    return most if most < NEARLY_EQUAL * rarest else rarest


def held_bytes(
    stage: DeviceStage, context: int, layout: Layout, each: int | Fraction | CacheFormat, width: int
) -> Fraction | int:
    """Returns the cached bytes of one sequence in a stage, with `each` a cached number and `width` an activation."""
    shared = with_states(stage, context, layout, each, width)
    return held_numbers(stage, context, layout).nbytes(each) if shared is None else shared.nbytes


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One sequence's pages where layers that keep states share a pool with those that keep tokens.

    A page has `tokens` of each of a group's `layers`, `token` bytes a token and layer; a state takes one page.
    """

    pages: int
    layers: int
    tokens: int
    token: float | int

    @property
    def nbytes(self) -> int:
        """The bytes of all pages."""
        return math.ceil(self.pages * self.layers * self.tokens * self.token)


def with_states(
    stage: DeviceStage, context: int, layout: Layout, each: int | Fraction | CacheFormat, width: int
) -> Shared | None:
    """Returns the pages of one sequence where layers with states and layers that keep tokens share one pool.

    A page holds one layer's state, and the fewest whole blocks of tokens that take as many bytes. `each` are the bytes
    of a cached number, `width` those of an activation, in which states are that are not float32. None where there are
    no states beside tokens, or where layers keep tokens of different sizes or of another sequence.
    """
    kinds = _kinds(stage, each, width)
    states = [size for window, size in kinds if window == STATE]
    per_token = {size for window, size in kinds if window != STATE}
    if not layout.grouped or not states or len(per_token) != 1:
        return None
    token = per_token.pop()
    block = layout.block * math.ceil(max(states) / (layout.block * token))
    group, pages = _group(kinds.values()), 0
    for (window, _), layers in kinds.items():
        r = Remembered(name="tokens", shape=(1,), window=window if window else None)
        tokens = block if window == STATE else held_tokens(r, context, replace(layout, block=block))
        pages += math.ceil(layers / group) * (tokens // block)
    whole = int(token) if token == int(token) else float(token)
    return Shared(pages=pages, layers=group, tokens=block, token=whole)


def _kinds(stage: DeviceStage, each: int | Fraction | CacheFormat, width: int) -> dict[tuple[int, Fraction | int], int]:
    """Returns how many layers of each kind there are, by window (0: every token) or `STATE`, and bytes.

    The bytes are those of a token or of the state. A layer that has both counts as one of each kind.
    """
    kinds: dict[tuple[int, Fraction | int], int] = {}
    for child in stage.folds.root.children:
        held: dict[int, Fraction | int] = {}
        for node in child.below():
            for r in node.own.remembers():
                kind = STATE if r.tokens_kept(ENDLESS) <= 1 else r.window or 0
                number = r.number_bytes(width if kind == STATE else each)
                many = Fraction(node.count, child.count) * r.size * number / r.every
                held[kind] = held.get(kind, 0) + many
        for kind, size in held.items():
            kinds[kind, size] = kinds.get((kind, size), 0) + child.count
    return kinds


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
