"""Linear attention: a feature map replaces the softmax, so that the past is one matrix.

Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Pass, Product, Remembered, divided, require_flags, require_number, require_sizes

# Tokens per chunk, computed in parallel before the state is updated: larger chunks mean more work, but fewer sequential
# steps.
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Mixer):
    """y_t = f(q_t)^T S_t / (f(q_t)^T z_t + eps), S_t = sum over s <= t of f(k_s) v_s^T, z_t = sum of f(k_s), f = elu+1.

    S and z together are the state: d_head x (d_head + 1) numbers per head, regardless of the sequence length. In a pass
    over many tokens, those in a chunk interact by masked products, and with earlier ones through the state.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads, each with its own state."""
    d_head: int
    """Width of a head."""
    bias: bool = False
    """Whether q, k and v have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    eps: float = 1e-6
    """Added to the sum of weights."""
    q: Map | None = None
    """Replaces the plain map q."""
    k: Map | None = None
    """Replaces the plain map k."""
    v: Map | None = None
    """Replaces the plain map v."""
    o: Map | None = None
    """Replaces the plain map o."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require_flags(self, "bias", "output_bias")
        require_number(self, "eps")
        self.require_maps()

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    def plain_maps(self) -> dict[str, Linear]:
        """q, k and v (d_model to n_heads*d_head), o (n_heads*d_head to d_model)."""
        q = Linear(d_in=self.d_model, d_out=self.d_query, bias=self.bias, split="out", belongs="attention")
        return {"q": q, "k": q, "v": q, "o": output_map(self.d_query, self.d_model, self.output_bias)}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their states; o's bias is replicated."""
        return self.resized(n_heads=divided(self, "n_heads", tensor))

    def chunks(self, run: Pass) -> list[tuple[int, int]]:
        """Returns (tokens, count) of the full chunks of a pass and of the partial one, if any."""
        full, rest = divmod(run.tokens, CHUNK)
        return [(size, n) for size, n in ((CHUNK, full), (rest, 1)) if size and n]

    def n_read(self, run: Pass) -> int:
        """Returns the tokens that read a state: all but those of a sequence's first chunk."""
        return run.tokens if run.past else max(0, run.tokens - CHUNK)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; scores and weighted sums within chunks; reading the state, and updating it per chunk.

        The last chunk updates it only for a cache.
        """
        heads, wide = run.batch * self.n_heads, self.d_head + 1
        within: list[Product] = []
        for size, n in self.chunks(run):
            pairs = 2 * heads * n * size * (size + 1) // 2
            within += [
                Product(name="scores", a=size, b=self.d_head, c=size, n=heads * n, needed=pairs * self.d_head),
                Product(name="mix", a=size, b=size, c=wide, n=heads * n, needed=pairs * wide),
            ]
        last = self.chunks(run)[-1][0]
        before, read = run.tokens - last, self.n_read(run)
        return (
            *self.map_products(run, "q", "k", "v"),
            *within,
            *((Product(name="read", a=read, b=self.d_head, c=wide, n=heads),) if read else ()),
            *((Product(name="update", a=self.d_head, b=before, c=wide, n=heads),) if before else ()),
            Product(name="last update", a=self.d_head, b=last, c=wide, n=heads, caching=True),
            *self.map_products(run, "o"),
        )

    def remembers(self) -> tuple[Remembered, ...]:
        """The state: n_heads * d_head * (d_head + 1) numbers for a sequence."""
        return (Remembered(name="state", shape=(self.n_heads, self.d_head, self.d_head + 1), per="sequence"),)
