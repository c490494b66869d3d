"""Blocks: lists of residual branches, each with a norm, a mixer or feed-forward, and a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asbuilt.spec.altup import AlternatingUpdates
from asbuilt.spec.experts import FeedForward
from asbuilt.spec.laurel import Laurel
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Weight, is_finite, require, require_flags, require_names, require_number
from asbuilt.spec.per_layer import PerLayerInput
from asbuilt.spec.side import SideTransformer
from asbuilt.spec.streams import HyperConnection
from asbuilt.spec.tile_embedding import TileEmbedding


@dataclass(frozen=True, kw_only=True)
class Parallel(Part):
    """s attention(x) + t ffn(x): both read the same normed input (PaLM, arXiv 2204.02311, section 2).

    Instead of a feed-forward it may be another mixer (Falcon-H1, arXiv 2507.22448, section 2). Each may read the input
    times a factor.
    """

    attention: Mixer
    """The mixer."""
    ffn: FeedForward | Mixer
    """The feed-forward, or another mixer, with the same input."""
    input_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on what the two read."""
    output_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on what the two give, s and t."""

    def __post_init__(self) -> None:
        for name in ("input_scales", "output_scales"):
            two = getattr(self, name)
            good = isinstance(two, tuple) and len(two) == 2 and all(is_finite(x) and x > 0 for x in two)
            require(self, name, good, "two finite numbers above 0")
        same = self.attention.d_model == self.ffn.d_model
        require(self, "ffn", same, f"d_model = {self.attention.d_model} as in the attention")
        for name in ("attention", "ffn"):
            require(self, name, reads_stream(getattr(self, name)), "one that reads no more than the stream")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.attention.d_model


Body = Mixer | FeedForward | PerLayerInput | Parallel | TileEmbedding


def reads_stream(body: Body) -> bool:
    """Returns whether a body reads vectors as wide as the stream."""
    return not isinstance(body, Mixer) or body.input_width == body.d_model


@dataclass(frozen=True, kw_only=True)
class Branch(Part):
    """One residual branch: sum_norm(r + scale * g * post_norm(body(norm(x)))), where each norm and g may be absent.

    The residual r is stream_scale * x, or stream_scale * norm(x) where the stream is `normed`. What is `beside` the
    body reads norm(x) too, and is added to g * post_norm(...) before the scale. With a `side` transformer the body
    reads norm(x + side(x)) instead; the stream itself stays x. A `parallel` branch has the same input as the branch
    before it, and is added to that branch's sum; with `block_input` it reads what the block reads. With `streams` x is
    read from several residual streams, and the output written to all of them. g is a `layer_scale`, one learned factor
    for each number of the stream (Touvron et al. 2021, arXiv 2103.17239); a `gated` branch's output is multiplied by
    the tanh of one learned number (Alayrac et al. 2022, Flamingo, arXiv 2204.14198, section 2.3).
    """

    name: str
    """Its segment in every path below it."""
    side: SideTransformer | None = None
    """Whose result is added to the input, and not to the stream; None for none."""
    norm: Norm | None = None
    """Norm of the body's input."""
    streams: HyperConnection | None = None
    """How it reads and writes several residual streams; None for one."""
    body: Body
    """The mixer or feed-forward."""
    post_norm: Norm | None = None
    """Norm of the body's output."""
    beside: Laurel | None = None
    """A low-rank residual of the body's input, which is added to its output."""
    sum_norm: Norm | None = None
    """Norm of the stream after the branch is added."""
    scale: float = 1.0
    """Factor on the branch's output."""
    parallel: bool = False
    """Whether it has the same input as the branch before it."""
    block_input: bool = False
    """Whether it reads the block's input, rather than the stream after the branch before it."""
    layer_scale: bool = False
    """Whether a learned vector multiplies the branch's output."""
    gated: bool = False
    """Whether the tanh of a learned number multiplies the branch's output."""
    after_source: bool = False
    """Whether tokens that come before the image, which cross-attention reads, get nothing from the branch."""
    stream_scale: float = 1.0
    """Factor on the stream that the output is added to."""
    normed: bool = False
    """Whether the output is added to the normalised stream, in place of the stream before its norm."""

    def __post_init__(self) -> None:
        simple = isinstance(self.name, str) and self.name.isidentifier()
        require(self, "name", simple, "a name of letters, digits and underscores: it is part of every path")
        require_number(self, "scale")
        require_number(self, "stream_scale")
        require_flags(self, "parallel", "block_input", "layer_scale", "normed", "gated", "after_source")
        for field in ("norm", "post_norm", "sum_norm"):
            norm = getattr(self, field)
            fits = norm is None or norm.d == self.body.d_model
            require(self, field, fits, f"a norm over d_model = {self.body.d_model}")
        require(self, "body", reads_stream(self.body), "one that reads no more than the stream")
        fits = self.beside is None or self.beside.d_model == self.body.d_model
        require(self, "beside", fits, f"one of d_model = {self.body.d_model}")
        fits = self.side is None or self.side.d_model == self.body.d_model
        require(self, "side", fits, f"one of d_model = {self.body.d_model}")
        allowed = "one alone: parallel, or of the block's input"
        require(self, "block_input", not (self.parallel and self.block_input), allowed)
        if self.streams is not None:
            fits = self.streams.d_model == self.body.d_model
            require(self, "streams", fits, f"streams of d_model = {self.body.d_model}")
            plain = self.scale == self.stream_scale == 1.0 and not self.again
            plain = plain and self.sum_norm is None and self.side is None
            require(self, "streams", plain, "none with a scale, a norm of the sum, a side, or in parallel")
        alone = self.norm is not None and self.streams is None and self.side is None and not self.again
        require(self, "normed", not self.normed or alone, "false without a norm, with streams, a side, or in parallel")

    @property
    def again(self) -> bool:
        """Whether it reads what an earlier branch of its block read."""
        return self.parallel or self.block_input

    def holds(self) -> dict[str, Weight]:
        """g (d_model), and the number whose tanh gates, 0 at first, if enabled."""
        scale = {"layer_scale": Weight(shape=(self.body.d_model,), role="gain")} if self.layer_scale else {}
        return scale | ({"gate": Weight(shape=(1,), role="gain", init="zeros")} if self.gated else {})


@dataclass(frozen=True, kw_only=True)
class Block(Part):
    """A sequence of residual branches; with `scaled` the stream after them is multiplied by one stored number.

    One set of weights may serve at several depths (ALBERT, Lan et al. 2019, arXiv 1909.11942, section 3.1): the first
    block lends them under the name `weights_name`, and equal later ones are those of `weights_from`.

    With `updates` the branches run on one of several residual streams, which are all predicted before and corrected
    after.
    """

    branches: tuple[Branch, ...]
    """The branches, in order."""
    scaled: bool = False
    """Whether the stream after the branches is multiplied by a number that is stored, but not trained."""
    weights_name: str | None = None
    """Name under which later blocks use these weights; None if none does."""
    weights_from: str | None = None
    """Name of the earlier block whose weights these are; None for its own."""
    updates: AlternatingUpdates | None = None
    """How several residual streams are read and written by all branches together; None for one."""

    def __post_init__(self) -> None:
        names = [branch.name for branch in self.branches]
        require(self, "branches", len(names) > 0, "at least one branch")
        require(self, "branches", len(set(names)) == len(names), "branches of different names")
        require(self, "branches", not names or not self.branches[0].again, "a first branch that is not parallel")
        require_flags(self, "scaled")
        require_names(self, "weights_name", "weights_from")
        both = self.weights_name is not None and self.weights_from is not None
        require(self, "weights_name", not both, "none: its weights are another's")
        if self.updates is not None:
            self._require_updates(self.updates)

    def _require_updates(self, updates: AlternatingUpdates) -> None:
        d_model = self.branches[0].body.d_model
        require(self, "updates", updates.d_model == d_model, f"updates of streams of d_model = {d_model}")
        own = any(branch.streams is not None for branch in self.branches)
        require(self, "updates", not own, "none beside branches with streams of their own")
        taken = any(branch.name == "updates" for branch in self.branches)
        require(self, "branches", not taken, "none named updates, which is what predicts and corrects streams")

    @property
    def lends(self) -> str | None:
        """Its `weights_name`."""
        return self.weights_name

    @property
    def borrows(self) -> str | None:
        """Its `weights_from`."""
        return self.weights_from

    def buffers(self) -> dict[str, Weight]:
        """The factor on the stream, if enabled."""
        return {"scale": Weight(shape=(1,), role="gain", fill=1.0)} if self.scaled else {}

    @property
    def crosses(self) -> bool:
        """Whether it reads a source: a pass without one leaves the stream as it is."""
        bodies = (branch.body for branch in self.branches)
        return any(isinstance(body, Mixer) and body.source_width is not None for body in bodies)

    @property
    def stream_width(self) -> int:
        """Width of its input: of all residual streams together."""
        return self.branches[0].body.d_model * (self.n_streams or 1)

    @property
    def n_streams(self) -> int | None:
        """Residual streams that it reads and writes; None for one, which is the stream."""
        found = self.updates or self.branches[0].streams
        return None if found is None else found.n_streams

    @property
    def billed(self) -> Block:
        """The same with bodies that stand for theirs."""
        return replace(self, branches=tuple(replace(one, body=one.body.billed) for one in self.branches))

    def children(self) -> Iterator[tuple[str, Part]]:
        """Yields the branches under their own names, then what updates their streams."""
        yield from ((branch.name, branch) for branch in self.branches)
        if self.updates is not None:
            yield "updates", self.updates
