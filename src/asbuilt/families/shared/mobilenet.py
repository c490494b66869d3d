"""MobileNet-V5, the tower of images of Gemma 3n: its stages by name, how it is built of them, and its names on disk.

Sizes are those of timm's `mobilenetv5_300m_enc`, which a config names and never spells out. Names are timm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asbuilt.errors import InputError, one_of
from asbuilt.families.shared.table import Entry, Reshaped, entry
from asbuilt.spec import (
    ConvolvedPatches,
    GridAttention,
    GridConvolution,
    ImageEncoder,
    InvertedResidual,
    PixelConvolution,
    RMSNorm,
)
from asbuilt.spec.part import Part


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A convolution to `expand` times the width, and one back: the block that needs most products."""

    expand: int = 4
    stride: int = 1


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """Maps to `expand` times the width and back, after a convolution of channels apart, and around another."""

    start: int = 0
    middle: int = 0
    expand: int = 4
    stride: int = 1


@dataclass(frozen=True, kw_only=True)
class Attentive:
    """Attention with one head of keys and values, which are fewer by a stride."""

    n_heads: int
    d_head: int
    stride: int = 1


Stage = tuple[int, tuple[Edge | Inverted | Attentive, ...]]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes of a network: of its images, its stem, each stage's width and blocks, of its patches and their vectors."""

    image_size: int
    stem: int
    stages: tuple[Stage, ...]
    d_model: int
    n_side: int
    eps: float = 1e-6  # of all norms


def _apart(*taps: int) -> tuple[Inverted, ...]:
    return tuple(Inverted(start=n) for n in taps)


NETWORKS = {
    "mobilenetv5_300m_enc": Network(
        image_size=768,
        stem=64,
        stages=(
            (128, (Edge(stride=2), Edge(), Edge())),
            (256, (Inverted(start=3, middle=5, expand=6, stride=2), *_apart(5, 3, 5, 3))),
            (
                640,
                (
                    Inverted(start=5, middle=5, expand=6, stride=2),
                    *_apart(*[5] * 7),
                    Inverted(expand=1),
                    *(Attentive(n_heads=12, d_head=64, stride=2), Inverted(expand=2)) * 14,
                ),
            ),
            (
                1280,
                (
                    Inverted(start=5, middle=5, expand=6, stride=2),
                    *(Attentive(n_heads=16, d_head=96), Inverted(expand=2)) * 19,
                ),
            ),
        ),
        d_model=2048,
        n_side=16,
    )
}


class _Builder:
    """Builds blocks whose norms have `eps`."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def norm(self, d: int) -> RMSNorm:
        return RMSNorm(d=d, eps=self.eps)

    def conv(self, d_in: int, d_out: int, kernel: int = 1, stride: int = 1, **more: bool) -> GridConvolution:
        norm = self.norm(d_out)
        return GridConvolution(d_in=d_in, d_out=d_out, kernel=kernel, stride=stride, norm=norm, **more)

    def edge(self, said: Edge, d_in: int, d_out: int) -> InvertedResidual:
        wide = d_in * said.expand
        steps = (self.conv(d_in, wide, 3, said.stride, activated=True), self.conv(wide, d_out))
        return InvertedResidual(steps=steps, added=said.stride == 1 and d_in == d_out)

    def inverted(self, said: Inverted, d_in: int, d_out: int) -> InvertedResidual:
        wide, first = d_in * said.expand, 1 if said.middle else said.stride
        start = (self.conv(d_in, d_in, said.start, first, apart=True),) if said.start else ()
        apart = {"apart": True, "activated": True}
        middle = (self.conv(wide, wide, said.middle, said.stride, **apart),) if said.middle else ()
        steps = (*start, self.conv(d_in, wide, activated=True), *middle, self.conv(wide, d_out))
        return InvertedResidual(steps=steps, scaled=True, added=said.stride == 1 and d_in == d_out)

    def attentive(self, said: Attentive, width: int) -> GridAttention:
        reduced = self.conv(width, width, 3, said.stride, apart=True) if said.stride > 1 else None
        sizes = {"d_model": width, "n_heads": said.n_heads, "d_head": said.d_head}
        return GridAttention(**sizes, norm=self.norm(width), k_reduced=reduced, v_reduced=reduced)

    def block(self, said: Edge | Inverted | Attentive, d_in: int, d_out: int) -> InvertedResidual | GridAttention:
        if isinstance(said, Attentive):
            return self.attentive(said, d_in)
        return self.edge(said, d_in, d_out) if isinstance(said, Edge) else self.inverted(said, d_in, d_out)


def network(said: Network) -> ConvolvedPatches:
    """Returns the network of these sizes, which fuses its last two stages."""
    made, width = _Builder(said.eps), said.stem
    blocks: list[InvertedResidual | GridAttention] = []
    for out, stage in said.stages:
        for one in stage:
            blocks.append(made.block(one, width, out))
            width = out
    early, late = said.stages[-2:]
    both = early[0] + late[0]
    return ConvolvedPatches(
        image_size=said.image_size,
        patch_size=said.image_size // said.n_side,
        d_model=said.d_model,
        stem=PixelConvolution(
            d_in=3, d_out=said.stem, kernel=3, stride=2, bias=True, norm=made.norm(said.stem), activated=True
        ),
        blocks=tuple(blocks),
        fused=len(blocks) - len(late[1]) - 1,
        fuse=InvertedResidual(steps=(made.conv(both, 2 * both, activated=True), made.conv(2 * both, said.d_model))),
        norm=made.norm(said.d_model),
    )


def named(made: Part, family: str) -> str:
    """Returns the name of a network; raises InputError for one that has none."""
    found = next((name for name, said in NETWORKS.items() if network(said) == made), None)
    if found is None:
        where = "vision.tower.embedding"
        raise InputError(f"{family} needs a published network here", field=where, allowed=one_of(NETWORKS))
    return found


def tower(said: Network) -> ImageEncoder:
    """Returns the network as a tower, which has no blocks besides."""
    made = network(said)
    return ImageEncoder(embedding=made, blocks=(), max_positions=made.n_tokens, name="tower")


def entries(made: ConvolvedPatches, path: str, prefix: str) -> Iterator[Entry]:
    """Yields the entries of the network at `path`, whose names on disk begin with `prefix`.

    Raises InputError for blocks that files have no names for. A stage begins where a grid gets smaller.
    """
    yield from _of_conv(made.stem, f"{path}stem", f"{prefix}conv_stem.conv", f"{prefix}conv_stem.bn")
    stage, i = -1, 0
    for number, block in enumerate(made.blocks):
        smaller = made.sides[number + 2] < made.sides[number + 1]
        stage, i = (stage + 1, 0) if smaller or not number else (stage, i + 1)
        at, name = f"{path}blocks.{number}.", f"{prefix}blocks.{stage}.{i}."
        yield from _of_attention(block, at, name) if isinstance(block, GridAttention) else _of_steps(block, at, name)
    yield from _of_steps(made.fuse, f"{path}fuse.", f"{prefix}msfa.ffn.")
    yield entry(f"{path}norm.weight", f"{prefix}msfa.norm.weight")


def _of_conv(made: GridConvolution, at: str, conv: str, norm: str) -> Iterator[Entry]:
    yield from (entry(f"{at}.{weight}", f"{conv}.{weight}") for weight in made.holds())
    yield entry(f"{at}.norm.weight", f"{norm}.weight")


def _of_steps(block: InvertedResidual, at: str, name: str) -> Iterator[Entry]:
    """Yields those of the convolutions, which are named by their order, and of the factors."""
    names = _edge_names(block) or _inverted_names(block)
    if len({*names}) < len(names):
        raise InputError("files have no names for these convolutions", field=at.rstrip("."))
    for i, (step, (conv, norm)) in enumerate(zip(block.steps, names, strict=True)):
        yield from _of_conv(step, f"{at}steps.{i}", name + conv, name + norm)
    if block.scaled:
        yield entry(f"{at}scale", f"{name}layer_scale.gamma")


def _edge_names(block: InvertedResidual) -> list[tuple[str, str]]:
    """Returns the names of convolutions and norms of an edge; none for another block."""
    first = block.steps[0]
    is_edge = len(block.steps) == 2 and first.kernel > 1 and not first.apart
    return [("conv_exp", "bn1"), ("conv_pwl", "bn2")] if is_edge else []


def _inverted_names(block: InvertedResidual) -> list[tuple[str, str]]:
    """Returns those of other blocks: of maps in and out, and of what is convolved before and between them."""
    names, maps = [], 0
    for step in block.steps:
        kind = ("dw_start", "dw_mid") if step.apart else ("pw_exp", "pw_proj")
        names.append(kind[min(maps, 1)])
        maps += not step.apart
    return [(f"{one}.conv", f"{one}.bn") for one in names]


def _of_attention(block: GridAttention, at: str, name: str) -> Iterator[Entry]:
    yield entry(f"{at}norm.weight", f"{name}norm.weight")
    for own, theirs in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        plain, stored = block.maps[own].plain, f"{name}attn.{theirs}."
        shape = (plain.d_out, plain.d_in)
        yield entry(f"{at}{own}.weight", f"{stored}proj.weight", Reshaped(shape, (*shape, 1, 1)))
        reduced = getattr(block, f"{own}_reduced", None)
        if reduced is not None:
            yield from _of_conv(reduced, f"{at}{own}_reduced", f"{stored}down_conv", f"{stored}norm")
    yield entry(f"{at}scale", f"{name}layer_scale.gamma")
