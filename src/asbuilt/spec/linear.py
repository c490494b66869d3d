"""Linear maps, and their wrappers: packed weights and low-rank adapters.

A mixer or feed-forward has its maps as children, at `q`, `k`, `up`, ... It determines when each is multiplied and with
how many rows; the map declares its weights, how they are divided over devices, and its products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Self, TypeVar

from asbuilt.spec.edit import transform
from asbuilt.spec.part import (
    KINDS,
    Init,
    Kind,
    Part,
    Pass,
    Product,
    Split,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_format,
    require_number,
    require_sizes,
    walk,
)

P = TypeVar("P", bound=Part)
# What a clipped map clamps, the beginning of its bounds' names.
CLAMPED = ("input", "output")


@dataclass(frozen=True, kw_only=True)
class Linear(Part):
    """x W^T + b, from width `d_in` to `d_out`.

    `split` is the side that tensor parallelism divides: the rows of W (`out`), its columns (`in`, so that results are
    summed over devices), or neither. The initialisation of a map that writes `to_stream` is scaled down with depth.
    `belongs` is the kind of part that its parameters are counted under. With `copies` it is a stack of that many maps.
    A `clipped` map clamps x before the product and its result after it, each to two stored numbers, which are buffers.
    Wrappers act between the clamps.
    """

    d_in: int
    """Width of the input."""
    d_out: int
    """Width of the output."""
    bias: bool = False
    """Whether there is a bias b."""
    split: Split | None = None
    """The side of W that tensor parallelism divides: its rows (`out`), its columns (`in`), or neither."""
    to_stream: bool = False
    """Whether it writes to the residual stream, so that its initialisation is scaled down with depth."""
    belongs: Kind = "other"
    """The kind of part that its parameters are counted under."""
    copies: int | None = None
    """Number of stacked maps of this size, one per expert; None for a single map."""
    clipped: bool = False
    """Whether input and result are clamped, each between two numbers that are stored with W; not in a stack."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_in", "d_out", *(() if self.copies is None else ("copies",)))
        require_flags(self, "bias", "to_stream", "clipped")
        require(self, "clipped", not self.clipped or self.copies is None, "false in a stack of maps")
        require(self, "split", self.split in ("out", "in", None), "out, in or none")
        require_choice(self, "belongs", KINDS)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """What its parameters are counted under."""
        return self.belongs

    @property
    def plain(self) -> Linear:
        """The map without wrappers: itself."""
        return self

    @property
    def format(self) -> None:
        """The block format of W: none."""
        return None

    @property
    def unclipped(self) -> Linear:
        """The map without clamps."""
        return replace(self, clipped=False) if self.clipped else self

    def around(self, plain: Linear) -> Linear:
        """Returns another map with the wrappers of this one, which are none, clamped if this one is."""
        return replace(plain, clipped=self.clipped)

    @property
    def stack(self) -> tuple[int, ...]:
        """The first dimension of all its weights if it is a stack of maps; empty for a single map."""
        return () if self.copies is None else (self.copies,)

    def holds(self) -> dict[str, Weight]:
        """W (d_out, d_in) and, if enabled, b (d_out); a stack concatenates them along the first dimension."""
        init: Init | None = "depth_scaled" if self.to_stream else None
        shape = (*self.stack, self.d_out, self.d_in)
        matrix = {"weight": Weight(shape=shape, role="matrix", init=init, split=self.split)}
        if not self.bias:
            return matrix
        return matrix | {"bias": Weight(shape=shape[:-1], role="bias", split="out" if self.split == "out" else None)}

    def buffers(self) -> dict[str, Weight]:
        """The bounds of input and result, which start as none, if clipped."""
        if not self.clipped:
            return {}
        bounds = {
            "min": Weight(shape=(), role="bias", fill=-math.inf),
            "max": Weight(shape=(), role="bias", fill=math.inf),
        }
        return {f"{of}_{name}": bound for of in CLAMPED for name, bound in bounds.items()}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_out / tensor rows, or d_in / tensor columns and a replicated bias."""
        if self.split is None:
            return self
        field = "d_out" if self.split == "out" else "d_in"
        return replace(self, **{field: divided(self, field, tensor)})

    def products(self, name: str, rows: int) -> tuple[Product, ...]:
        """Returns the products with `rows` rows; weights have the names that the owner uses for the map `name`."""
        return (Product(name=name, a=rows, b=self.d_in, c=self.d_out, weight=f"{name}.weight"),)

    def merging(self, name: str) -> tuple[Product, ...]:
        """Returns the products of merging wrappers into one matrix: none."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Packed(Part):
    """x W^T + b, with W packed as in files and dequantised for each product.

    W is frozen. `format` names a block format of GGUF, such as q4_k, or mxfp4.
    """

    base: Linear
    """The map whose weights are packed."""
    format: str
    """The block format, along the rows of W."""

    def __post_init__(self) -> None:
        require(self, "base", isinstance(self.base, Linear), "a Linear")
        require(self, "format", self.format is not None, "the name of a block format")
        require_format(self, "format", self.base.d_in)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """What its parameters are counted under."""
        return self.base.kind

    @property
    def plain(self) -> Linear:
        """The unpacked map."""
        return self.base

    def around(self, plain: Linear) -> Packed:
        """Returns another map, packed in the same format."""
        return replace(self, base=self.base.around(plain))

    def children(self) -> Iterator[tuple[str, Part]]:
        """None: its weights have the names of the plain map's."""
        return iter(())

    def holds(self) -> dict[str, Weight]:
        """The map's weights, with W packed."""
        held = self.base.holds()
        return held | {"weight": replace(held["weight"], format=self.format, frozen=True)}

    def buffers(self) -> dict[str, Weight]:
        """The map's."""
        return self.base.buffers()

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Divided like the map, in whole blocks."""
        return replace(self, base=self.base.shard(tensor, expert))

    def products(self, name: str, rows: int) -> tuple[Product, ...]:
        """Those of the map, without a gradient of its weight."""
        return tuple(replace(product, one_gradient=True) for product in self.base.products(name, rows))

    def merging(self, name: str) -> tuple[Product, ...]:
        """None: blocks are dequantised without products."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Lora(Part):
    """x W^T + b + (alpha / rank) (x A^T) B^T, a frozen map plus a low-rank one.

    Hu et al. 2021 (arXiv 2106.09685), section 4.1: A is initialised randomly and B to zero, so that the sum starts as
    the frozen map.
    """

    base: Linear | Packed
    """The frozen map."""
    rank: int
    """Width between A and B."""
    alpha: float
    """The adapter's output is multiplied by alpha / rank."""

    def __post_init__(self) -> None:
        require(self, "base", isinstance(self.base, Linear | Packed), "a map that has no adapter yet")
        require_sizes(self, "rank")
        require_number(self, "alpha")
        most = max(self.plain.d_in, self.plain.d_out)
        require(self, "rank", self.rank <= most, f"at most {most}, the larger side of the map")

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """What its parameters are counted under."""
        return self.base.kind

    @property
    def format(self) -> str | None:
        """The block format of W, None for plain numbers."""
        return self.base.format

    @property
    def scale(self) -> float:
        """Factor on the low-rank map."""
        return self.alpha / self.rank

    @property
    def plain(self) -> Linear:
        """The map without its adapter."""
        return self.base.plain

    def around(self, plain: Linear) -> Lora:
        """Returns another map with an adapter of the same rank."""
        return replace(self, base=self.base.around(plain))

    def children(self) -> Iterator[tuple[str, Part]]:
        """None: the frozen map's weights have the same names as without an adapter."""
        return iter(())

    def holds(self) -> dict[str, Weight]:
        """The map's weights, frozen; A (rank, d_in) and B (d_out, rank), divided on the same side as the map."""
        frozen = {name: replace(weight, frozen=True) for name, weight in self.base.holds().items()}
        split, plain = self.plain.split, self.plain
        a = Weight(shape=(*plain.stack, self.rank, plain.d_in), role="matrix", split="in" if split == "in" else None)
        shape = (*plain.stack, plain.d_out, self.rank)
        b = Weight(shape=shape, role="matrix", init="zeros", split="out" if split == "out" else None)
        return frozen | {"lora_a": a, "lora_b": b}

    def buffers(self) -> dict[str, Weight]:
        """The map's."""
        return self.base.buffers()

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Divided like the map."""
        return replace(self, base=self.base.shard(tensor, expert))

    def products(self, name: str, rows: int) -> tuple[Product, ...]:
        """Those of the map, without a gradient of its weight, x A^T, and its product with B^T."""
        plain = self.plain
        return (
            *(replace(product, one_gradient=True) for product in self.base.products(name, rows)),
            Product(name=f"{name} lora_a", a=rows, b=plain.d_in, c=self.rank, weight=f"{name}.lora_a"),
            Product(name=f"{name} lora_b", a=rows, b=self.rank, c=plain.d_out, weight=f"{name}.lora_b"),
        )

    def merging(self, name: str) -> tuple[Product, ...]:
        """B A."""
        plain = self.plain
        return (Product(name=f"{name} merged", a=plain.d_out, b=self.rank, c=plain.d_in, weight=f"{name}.lora_b"),)


Map = Linear | Packed | Lora


def stack_name(name: str, leaf: str) -> str:
    """Returns a part's name for the weight `leaf` of its stack of maps `name`: up, up_bias, up_lora_a."""
    return name if leaf == "weight" else f"{name}_{leaf}"


@cache
def _map_fields(kind: type[Part]) -> dict[str, bool | None]:
    """Returns the fields of a part that can replace a map, with the value that means the plain one.

    That is None, or True for a flag that enables the map.
    """
    plain: dict[str, bool | None] = {"Map | None": None, "Map | bool": True}
    return {field.name: plain[str(field.type)] for field in fields(kind) if field.type in plain}


@dataclass(frozen=True, kw_only=True)
class Mapped(Part):
    """A part whose linear maps are children.

    The field with a map's name holds its replacement, None for the plain map.
    """

    def plain_maps(self) -> dict[str, Linear]:
        """Returns the plain maps by name, with this part's sizes, in order of computation."""
        raise NotImplementedError

    def plain_stacks(self) -> dict[str, Linear]:
        """Returns the plain stacks of maps by name; their weights belong to this part, `up` and `up_bias`."""
        return {}

    @cached_property
    def maps(self) -> dict[str, Map]:
        """The maps by name, with their wrappers."""
        return {name: self._around(name) or plain for name, plain in self.plain_maps().items()}

    @cached_property
    def stacks(self) -> dict[str, Map]:
        """The stacks of maps by name, with their wrappers."""
        return {name: self._around(name) or plain for name, plain in self.plain_stacks().items()}

    def _around(self, name: str) -> Map | None:
        """Returns the replacement of a map; a field of this name may also be something else, such as a flag."""
        found = getattr(self, name) if name in _map_fields(type(self)) else None
        return None if isinstance(found, bool) else found

    @cached_property
    def _below(self) -> tuple[tuple[str, Part], ...]:
        own = self.maps.keys() | self.stacks.keys()
        return (*self.maps.items(), *(found for found in super()._below if found[0] not in own))

    def require_maps(self) -> None:
        """Raises InputError for a replacement of another size, or of a map that this part does not have."""
        made = self.plain_maps() | self.plain_stacks()
        for name, unwrapped in _map_fields(type(self)).items():
            found, plain = getattr(self, name), made.get(name)
            wraps = isinstance(found, Map) and plain is not None and found.plain.unclipped == plain
            fits = wraps or (found is None and unwrapped is None) or (isinstance(found, bool) and unwrapped is True)
            require(self, name, fits, f"{plain}, or an adapter of it" if plain else "none: this part has no such map")

    def matrix_paths(self, path: str) -> dict[str, str]:
        """Returns the names of the maps and stacks by the full path of each matrix, this part being at `path`."""
        begin = f"{path}." if path else ""
        stacks = {f"{begin}{stack_name(name, 'weight')}": name for name in self.stacks}
        return {f"{begin}{name}.weight": name for name in self.maps} | stacks

    def with_maps(self, changed: Mapping[str, Map]) -> Self:
        """Returns this part with the named maps and stacks replaced; plain ones become None."""
        unwrapped = _map_fields(type(self))
        usual = {name: isinstance(one, Linear) and not one.clipped for name, one in changed.items()}
        fields = {name: unwrapped[name] if usual[name] else one for name, one in changed.items()}
        return replace(self, **fields) if fields else self

    def resized(self, **sizes: Any) -> Self:  # noqa: ANN401  # fields of the part
        """Returns this part with other sizes, keeping the wrappers of its maps."""
        names = (*self.plain_maps(), *self.plain_stacks())
        wrapped = {name: m for name in names if (m := self._around(name)) is not None}
        plain = replace(self, **sizes, **{name: _map_fields(type(self))[name] for name in wrapped})
        if not wrapped:
            return plain
        made = plain.plain_maps() | plain.plain_stacks()
        return replace(plain, **{name: around.around(made[name]) for name, around in wrapped.items()})

    def local_weights(self) -> dict[str, Weight]:
        """Its own weights and those of its maps, by the names in its products."""
        return self.holds() | {
            f"{name}.{weight}": held for name, one in self.maps.items() for weight, held in one.holds().items()
        }

    def stack_weights(self) -> dict[str, Weight]:
        """Returns the weights of its stacks, under this part's names, matrices first."""
        held = [(name, leaf, weight) for name, one in self.stacks.items() for leaf, weight in one.holds().items()]
        held.sort(key=lambda found: found[1] != "weight")
        return {stack_name(name, leaf): weight for name, leaf, weight in held}

    def stack_products(self, name: str, rows: int) -> tuple[Product, ...]:
        """Returns the products of a stack with `rows` rows in total, each row with one of its maps."""
        products = self.stacks[name].products(name, rows)
        return tuple(replace(p, weight=stack_name(*(p.weight or "").rsplit(".", 1))) for p in products)

    def map_products(self, run: Pass, *names: str) -> tuple[Product, ...]:
        """Returns the products of the named maps in one pass, each with the rows of `map_rows`."""
        return tuple(p for name in names for p in self.maps[name].products(name, self.map_rows(name, run)))

    def map_rows(self, name: str, run: Pass) -> int:
        """Returns how many rows the map multiplies in one pass."""
        seen = self.child_run(name, run)
        return 0 if seen is None else seen.rows


def maps_by_path(part: Part) -> dict[str, Map]:
    """Returns every linear map below a part, stacks included, by the full path of its matrix."""
    mapped = ((path, found) for path, found in walk(part) if isinstance(found, Mapped))
    return {
        matrix: (owner.maps | owner.stacks)[name]
        for path, owner in mapped
        for matrix, name in owner.matrix_paths(path).items()
    }


def transform_maps(part: P, change: Callable[[str, Map], Map]) -> P:
    """Returns the part with each linear map below it replaced by `change(path of its matrix, map)`."""

    def changed(path: str, owner: Part) -> Part:
        if not isinstance(owner, Mapped):
            return owner
        every = owner.maps | owner.stacks
        made = {name: change(matrix, every[name]) for matrix, name in owner.matrix_paths(path).items()}
        return owner.with_maps({name: one for name, one in made.items() if one is not every[name]})

    return transform(part, changed)
