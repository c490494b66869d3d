"""Blocks: residual branches, each a norm, a mixer or feed-forward, and a scale, all of them data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asbuilt.spec.experts import FeedForward
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, require, require_flags, require_number


@dataclass(frozen=True, kw_only=True)
class Parallel(Part):
    """attention(x) + ffn(x): both read the same normed input (PaLM, arXiv 2204.02311, section 2)."""

    attention: Mixer
    """What mixes tokens."""
    ffn: FeedForward
    """The feed-forward part, which reads the same."""

    def __post_init__(self) -> None:
        same = self.attention.d_model == self.ffn.d_model
        require(self, "ffn", same, f"d_model = {self.attention.d_model} as in the attention")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.attention.d_model

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Both read the normed stream."""
        return (("ffn", "attention"),)

    def peak_bytes(self, run: Pass) -> int:
        """The busier of the two, the attention's result being there while the other runs; or both and their sum."""
        stream = run.rows * self.d_model * run.width
        return max(self.attention.peak_bytes(run), stream + self.ffn.peak_bytes(run), 3 * stream)


Body = Mixer | FeedForward | Parallel


@dataclass(frozen=True, kw_only=True)
class Branch(Part):
    """One residual branch: sum_norm(x + scale * post_norm(body(norm(x)))), where each norm may be absent.

    A `parallel` branch reads what the branch before it read, and is added to that one's sum.
    """

    name: str
    """Its segment of every path below."""
    norm: Norm | None = None
    """Norm of what the body reads."""
    body: Body
    """What the branch computes."""
    post_norm: Norm | None = None
    """Norm of what the body gives."""
    sum_norm: Norm | None = None
    """Norm of the stream after the branch is added."""
    scale: float = 1.0
    """What the branch is multiplied by before it is added."""
    parallel: bool = False
    """Whether it reads what the branch before it read."""

    def __post_init__(self) -> None:
        simple = isinstance(self.name, str) and self.name.isidentifier()
        require(self, "name", simple, "a name of letters, digits and underscores: it is part of every path")
        require_number(self, "scale")
        require_flags(self, "parallel")
        for field in ("norm", "post_norm", "sum_norm"):
            norm = getattr(self, field)
            fits = norm is None or norm.d == self.body.d_model
            require(self, field, fits, f"a norm over d_model = {self.body.d_model}")

    @property
    def reader(self) -> str:
        """The path, from the block, of the part that reads the stream."""
        first = "norm" if self.norm is not None else "body.attention" if isinstance(self.body, Parallel) else "body"
        return f"{self.name}.{first}"

    def recomputes(self) -> tuple[str, ...]:
        """The normed input, from the stream that the norm keeps."""
        reader = "body.attention" if isinstance(self.body, Parallel) else "body"
        return () if self.norm is None else (f"{reader}:input",)

    def peak_bytes(self, run: Pass) -> int:
        """The busiest of norm, body with the normed input, post-norm, and the sum."""
        stream = run.rows * self.body.d_model * run.width
        normed = stream if self.norm is not None else 0
        norms = [norm.peak_bytes(run) for norm in (self.norm,) if norm is not None]
        after = [stream + norm.peak_bytes(run) for norm in (self.post_norm, self.sum_norm) if norm is not None]
        return max(normed + self.body.peak_bytes(run), 2 * stream, *norms, *after)


@dataclass(frozen=True, kw_only=True)
class Block(Part):
    """Residual branches, one after the other."""

    branches: tuple[Branch, ...]
    """One after the other."""

    def __post_init__(self) -> None:
        names = [branch.name for branch in self.branches]
        require(self, "branches", len(names) > 0, "at least one branch")
        require(self, "branches", len(set(names)) == len(names), "branches of different names")
        require(self, "branches", not names or not self.branches[0].parallel, "a first branch that is not parallel")

    def peak_bytes(self, run: Pass) -> int:
        """The busiest branch; from the second on its input is alive beside the block's."""
        stream = run.rows * self.branches[0].body.d_model * run.width
        return max(branch.peak_bytes(run) + (stream if i else 0) for i, branch in enumerate(self.branches))

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """What a parallel branch reads first is what the branch before it read first."""
        pairs = zip(self.branches, self.branches[1:], strict=False)
        return tuple((second.reader, first.reader) for first, second in pairs if second.parallel)

    def children(self) -> Iterator[tuple[str, Part]]:
        """A branch is found under its own name."""
        return ((branch.name, branch) for branch in self.branches)
