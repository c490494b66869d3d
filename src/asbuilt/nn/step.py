"""One forward pass: its tokens, their positions, and what all layers share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from asbuilt.kernels.attention import Mask
from asbuilt.kernels.codes import Coded
from asbuilt.kernels.image_grid import Grid, coordinates
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache
    from asbuilt.nn.linear import Matrix

T = TypeVar("T")
# A layer's keys and values (B, K, S, width), and what returns the positions of its keys (B or 1, S), -1 for none.
KeysAndValues = tuple[Tensor | Coded, Tensor | Coded, Callable[[], Tensor]]


class Step:
    """One forward pass over (B, T) tokens, `past[b]` of row b's tokens already cached.

    `valid_BT` marks valid tokens; None means that all are valid. Positions count only a row's valid tokens, so padding
    on either side does not affect the others.
    `reach` is the text length that RoPE scalings assume per row: the length after this pass, unless more tokens are
    known to follow. Packed tables are looked up in `dtype`.
    `tokens_BT` are the token ids of a stack that reads tokens, `types_BT` their types, if not all 0. A stack may share
    with its layers `relative_BH`, its bias table, `distances_LM`, its embeddings of distances, and `table`, its
    embedding table; `source_BSM` is an encoder's
    output, None once the layers have cached it, and `source_mask` marks its valid tokens.
    `per_layer_BTP` are the tokens' vectors for the block that runs.
    `lent` are the keys and values that later layers read, by the name of the layer that made them, and `lent_values`
    values alone (B, T, any); `lenders` are the modules whose weights later ones use, by name. `entered_BTM` is the
    stream before the first block.
    `images_NPM`, or sounds in their place, replace tokens, and so do `sounds_PM` beside images; `sounds` are the tokens
    of each sound. `ends_BT` is the last position that each token attends to, if not its own
    (`ends_in_windows`: in layers with windows alone; `ends_past_windows`: what attends both ways does so whatever the
    window). `choice` are the keys (B, T, S) that the last indexer chose, None if all.
    Images of any size have `grids` of tokens (frames, rows, columns) in `places_BT`, and vectors `added` to the stream
    there after each of the first blocks. An image cut into tiles has a tiling of the number in `tilings_N`, and
    `padding_BT` marks tokens that do not attend to each other; a text that reads it across has `after_BT`, 0 for tokens
    before it and 1 from it on, in the dtype of the pass. One without an image is `sourceless`. `coordinates_3BT` are
    the tokens' coordinates, if not their positions, for which an image's placeholders are `adjacent`; `grid` is that of
    the patches of a pass over images. Rows of several documents have `documents_BT`, the number of each token's: it
    attends to those of its own alone, and positions count from the document's first token in the row.
    """

    documents_BT: Tensor | None = None
    tokens_BT: Tensor | None = None
    types_BT: Tensor | None = None
    relative_BH: Tensor | None = None
    distances_LM: Tensor | None = None
    table: Matrix | None = None
    source_BSM: Tensor | None = None
    source_mask: Mask = None
    images_NPM: Tensor | None = None
    sounds_PM: Tensor | None = None
    sounds: tuple[int, ...] = ()
    ends_BT: Tensor | None = None
    ends_in_windows: bool = False
    ends_past_windows: bool = False
    tilings_N: Tensor | None = None
    padding_BT: Tensor | None = None
    after_BT: Tensor | None = None
    sourceless: bool = False
    choice: Tensor | None = None
    per_layer_BTP: Tensor | None = None
    entered_BTM: Tensor | None = None
    grids: tuple[tuple[int, int, int], ...] = ()
    places_BT: Tensor | None = None
    added: tuple[Tensor, ...] = ()
    coordinates_3BT: Tensor | None = None
    adjacent: bool = True
    grid: Grid | None = None

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        past: tuple[int, ...] | None = None,
        valid_BT: Tensor | None = None,
        cache: Cache | None = None,
        kernel: Kernel = "fused",
        reach: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._reach, self.dtype = reach, torch.get_default_dtype() if dtype is None else dtype
        self.batch, self.tokens = shape
        self.past = past or (0,) * self.batch
        self.valid_BT, self.cache, self.device = valid_BT, cache, device
        self.kernel: Kernel = kernel
        self.lent: dict[str, KeysAndValues] = {}
        self.lent_values: dict[str, Tensor] = {}
        self.lenders: dict[str, nn.Module] = {}
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, computed once for all layers that use this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Returns the result of `make`, which depends on no token: numbers that have to be copied to the device."""
        return self.once(("constant", key), make)

    def copied(self) -> Step:
        """Returns the step as it is now: what layers share or lend from now on, this one and the copy do not."""
        made = copy.copy(self)
        made._made, made.lent = dict(self._made), dict(self.lent)
        made.lent_values, made.lenders = dict(self.lent_values), dict(self.lenders)
        return made

    def share(self, step: Step) -> None:
        """Takes over tensors that layers of another copy of this step have made for all, without gradients."""
        made = {key: x for key, x in step._made.items() if isinstance(x, Tensor) and not x.requires_grad}
        self._made = made | self._made

    @cached_property
    def uniform(self) -> bool:
        """Whether all rows are at the same position, so that no mask per row is needed."""
        return self.documents_BT is None and self.valid_BT is None and len(set(self.past)) == 1

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of all tokens that attention may read, along `dim`: those of this pass."""
        return x

    @property
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """Runs of tokens that are not neighbours, each with the keys up to its last; empty if all are one run."""
        return ()

    def show(self, grid: Grid) -> None:
        """Tells the grid of rows and columns of the patches of this pass."""
        self.grid, self.coordinates_3BT = grid, coordinates(grid, self.device)

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far the coordinates of each row's next token are from its position, after images of any size."""
        return (0,) * self.batch if self.cache is None else self.cache.shifts

    @property
    def first(self) -> bool:
        """Whether no row has past tokens or padding."""
        return self.uniform and self.past[0] == 0

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row after this pass."""
        if self.valid_BT is None:
            return tuple(n + self.tokens for n in self.past)
        return tuple(n + m for n, m in zip(self.past, self.valid_BT.sum(1).tolist(), strict=True))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """The assumed text length of each row, at least `lengths`."""
        return self.lengths if self._reach is None else tuple(map(max, self._reach, self.lengths))

    @cached_property
    def past_B1(self) -> Tensor:
        """`past` as a column."""
        return torch.tensor(self.past, device=self.device)[:, None]

    @cached_property
    def lengths_B1(self) -> Tensor:
        """`lengths` as a column."""
        return torch.tensor(self.lengths, device=self.device)[:, None]

    @cached_property
    def positions_BT(self) -> Tensor:
        """Each token's position in its row, (1, T) if all rows agree; padding has the nearest valid position."""
        if self.uniform:
            return torch.arange(self.past[0], self.past[0] + self.tokens, device=self.device)[None]
        if self.documents_BT is not None:
            return within(self.documents_BT)
        if self.valid_BT is None:
            return self.past_B1 + torch.arange(self.tokens, device=self.device)
        return (self.past_B1 + self.valid_BT.cumsum(1) - 1).clamp(min=0)

    @cached_property
    def key_positions_BT(self) -> Tensor:
        """`positions_BT` with -1 for padding, which is masked as a key."""

        return self.positions_BT if self.valid_BT is None else self.positions_BT.masked_fill(~self.valid_BT, -1)


class ReplayedStep(Step):
    """A pass over one token per row, in a cache, whose positions (B, 1) are a tensor.

    What it computes depends on that tensor's numbers alone, so that it can be recorded once and run again for later
    tokens. Layers see the first `slots` places of the cache, of which the mask hides those that no token has.
    `constants` are kept from pass to pass, since a recorded pass cannot copy numbers to the device.
    """

    def __init__(
        self,
        positions_B1: Tensor,
        slots: int,
        *,
        cache: Cache,
        dtype: torch.dtype,
        kernel: Kernel,
        constants: dict[Hashable, Tensor],
    ) -> None:
        self._constants = constants
        shape, past = (positions_B1.shape[0], 1), (slots - 1,) * positions_B1.shape[0]
        super().__init__(shape, positions_B1.device, past=past, cache=cache, dtype=dtype, kernel=kernel)
        self.uniform = False
        self.past_B1 = self.positions_BT = positions_B1
        self.lengths_B1 = positions_B1 + 1

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Returns the result of `make`, computed once for all passes."""
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]


class Others(Protocol):
    """The processes that have the rest of each sequence's tokens."""

    def places(self, tokens: int) -> tuple[range, ...]:
        """Returns the positions of this process's tokens, in runs, of sequences of so many."""
        ...

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of the tokens of all, in the order of their positions along `dim`; its gradient is summed."""
        ...


class DividedStep(Step):
    """A pass over some tokens (B, T) of sequences of `length`, of which `others` have the rest at the same time."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        others: Others,
        length: int,
        kernel: Kernel = "fused",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, device, kernel=kernel, reach=(length,) * shape[0], dtype=dtype)
        self.others, self.places = others, others.places(length)
        self.uniform = False
        self.positions_BT = torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.places])[None]
        self.key_positions_BT = torch.arange(length, device=device)[None]

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of all processes' tokens."""
        return self.others.gathered(x, dim)

    @property
    def runs(self) -> tuple[tuple[slice, slice], ...]:
        """The runs of this process's tokens."""
        found, at = [], 0
        for run in self.places:
            found.append((slice(at, at + len(run)), slice(run.stop)))
            at += len(run)
        return tuple(found)


def within(documents_BT: Tensor) -> Tensor:
    """Returns how many tokens each (B, T) is behind the first one of its run of the same number."""
    at_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return at_T - (at_T * begins_BT).cummax(1).values
