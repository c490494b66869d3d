"""The file types of llama.cpp as mixtures of formats: which format Q4_K_M or IQ2_M uses for each weight.

A file type names the format of most weights, and spends more bits on important ones: the head, attention values, and
the down projection, in some or all layers. The rules are those of llama.cpp's quantiser (llama_tensor_get_type in
src/llama-quant.cpp); the tests compare the sums with published files. Types below four bits are assumed to be made with
an importance matrix, as published. What a file stores in float32 stays so here: vectors, routers, positions. Latent
attention is counted as in files before its key part was stored separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from asbuilt.cost.dtypes import dtype
from asbuilt.cost.folded import Held
from asbuilt.dtypes import GGUF_BLOCKS, PLAIN
from asbuilt.errors import InputError, near, one_of
from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.experts import MixtureOfExperts
from asbuilt.spec.head import Head
from asbuilt.spec.linear import Linear
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.model import Model
from asbuilt.spec.part import Part, Weight, walk, weights

BLOCK = re.compile(r"blocks\.(\d+)\.")
QUANTISED_ROLES = ("matrix", "table")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The inputs of the rules: layer `i` of `n`, queries per key head, experts."""

    i: int
    n: int
    groups: int
    experts: int

    @property
    def early(self) -> bool:
        """Whether the layer is in the first eighth."""
        return self.i < self.n // 8

    @property
    def often(self) -> bool:
        """Whether the layer is in the first or last eighth, or every third one in between."""
        return self.early or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2

    @property
    def grouped(self) -> bool:
        """Whether four or more queries share one value head, so that values are few and extra bits cheap."""
        return self.groups >= 4


Pick = Callable[[Place], str | None]  # None: the file type's own format


def _always(name: str) -> Pick:
    return lambda place: name


def _early(name: str, otherwise: str | None = None) -> Pick:
    return lambda place: name if place.early else otherwise


def _often(name: str) -> Pick:
    return lambda place: name if place.often else None


def _grouped(name: str, otherwise: str | None = None) -> Pick:
    return lambda place: name if place.grouped else otherwise


def _middle(name: str) -> Pick:
    return lambda place: name if place.n // 8 <= place.i < 7 * place.n // 8 else None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One file type: the format of most weights, of `head` and `table`, and `picks` for others by slot.

    `table` None means the format of most. With eight experts, `o8` uses five bits for the attention output; `low` marks
    types below three bits, which have special rules for such models.
    """

    base: str
    head: str = "q6_k"
    table: str | None = None
    picks: Mapping[str, Pick] = field(default_factory=dict)
    o8: bool = False
    low: bool = False


def _low(base: str, table: str, wide: str, o: Pick = lambda place: None) -> Mixture:
    """Returns a type below three bits: values in four bits if they are few, the first layers' `down` in `wide`."""
    v: Pick = lambda place: "q4_k" if place.grouped or place.experts >= 4 else wide  # noqa: E731
    return Mixture(base=base, head="q5_k", table=table, picks={"v": v, "down": _early(wide), "o": o}, low=True)


FOUR = {"v": _grouped("q5_k")}
Q3_K_L = Mixture(base="q3_k", picks={name: _always("q5_k") for name in ("v", "o", "down")} | {"qkv": _always("q4_k")})
Q4_K_M = Mixture(base="q4_k", picks={"v": _often("q6_k"), "down": _often("q6_k"), "qkv": _always("q5_k")}, o8=True)
Q5_K_M = Mixture(base="q5_k", picks={"v": _often("q6_k"), "down": _often("q6_k"), "qkv": _always("q6_k")})
Q2_K = Mixture(
    base="q2_k", picks={"v": _grouped("q4_k", "q3_k"), "o": _always("q3_k"), "down": _always("q3_k")}, o8=True
)
Q6_K = Mixture(base="q6_k")

# By llama.cpp's names of file types. Those that are also formats are named `mostly_q2_k` and so on, as in files.
FILE_TYPES: dict[str, Mixture] = {
    "q2_k": Q2_K,
    "q2_k_s": Mixture(base="q2_k", picks={"v": _grouped("q4_k"), "down": _early("q4_k")}),
    "q3_k_s": Mixture(base="q3_k", o8=True),
    "q3_k_m": Mixture(
        base="q3_k",
        o8=True,
        picks={
            "v": lambda place: "q5_k" if place.i < 2 else "q4_k",
            "down": lambda place: "q5_k" if place.i < place.n // 16 else "q4_k",
            "o": _always("q4_k"),
            "qkv": _always("q4_k"),
        },
    ),
    "q3_k_l": Q3_K_L,
    "q4_k_s": Mixture(
        base="q4_k", o8=True, picks={"v": lambda place: "q5_k" if place.i < 4 else None, "down": _early("q5_k")}
    ),
    "q4_k_m": Q4_K_M,
    "q5_k_s": Mixture(base="q5_k"),
    "q5_k_m": Q5_K_M,
    "q6_k": Q6_K,
    "q8_0": Mixture(base="q8_0", head="q8_0"),
    **{name: Mixture(base=name) for name in ("q4_0", "q4_1", "q5_0", "q5_1")},
    "iq1_s": _low("iq1_s", "q2_k", "q2_k", _always("iq2_xxs")),
    "iq1_m": _low("iq1_m", "q2_k", "q2_k", _always("iq2_xxs")),
    "iq2_xxs": _low("iq2_xxs", "q2_k", "q2_k"),
    "iq2_xs": _low("iq2_xs", "q2_k", "q2_k"),
    "iq2_s": _low("iq2_xs", "iq3_s", "iq3_s", _always("iq3_s")),
    "iq2_m": _low("iq2_s", "iq3_s", "iq3_s", _always("iq3_s")),
    "iq3_xxs": Mixture(
        base="iq3_xxs",
        head="q5_k",
        table="iq3_s",
        o8=True,
        picks={"v": _grouped("q4_k"), "k": _always("iq2_s"), "q": _always("iq2_s"), "o": _always("iq3_s")},
    ),
    "iq3_xs": Mixture(
        base="iq3_s",
        o8=True,
        picks={
            "v": _grouped("q4_k"),
            "k": _always("iq3_xxs"),
            "q": _always("iq3_xxs"),
            "gate": _middle("iq3_xxs"),
            "up": _middle("iq3_xxs"),
        },
    ),
    "iq3_s": Mixture(base="iq3_s", o8=True, picks={"v": _grouped("q4_k")}),
    "iq3_m": Mixture(
        base="iq3_s",
        o8=True,
        picks={
            "v": _always("q4_k"),
            "o": _always("q4_k"),
            "qkv": _always("q4_k"),
            "down": lambda place: "q4_k" if place.early or (place.experts == 8 and place.often) else None,
        },
    ),
    "iq4_nl": Mixture(base="iq4_nl", o8=True, picks=FOUR),
    "iq4_xs": Mixture(base="iq4_xs", o8=True, picks=FOUR),
    "tq1_0": Mixture(base="tq1_0", table="q4_k"),
    "tq2_0": Mixture(base="tq2_0", table="q4_k"),
    "mxfp4_moe": Mixture(base="q8_0", head="q8_0", picks={"expert": _always("mxfp4")}),
    # Also published: variants with head and table in eight bits.
    "q2_k_l": replace(Q2_K, head="q8_0", table="q8_0"),
    "q3_k_xl": replace(Q3_K_L, head="q8_0", table="q8_0"),
    "q4_k_l": replace(Q4_K_M, head="q8_0", table="q8_0"),
    "q5_k_l": replace(Q5_K_M, head="q8_0", table="q8_0"),
    "q6_k_l": replace(Q6_K, head="q8_0", table="q8_0"),
}
MOSTLY = "mostly_"
MIXTURES = {name if name not in GGUF_BLOCKS else MOSTLY + name: mixture for name, mixture in FILE_TYPES.items()}


def find_mixture(name: str) -> tuple[str, Mixture] | None:
    """Returns the canonical name and the mixture of a file type, None for other names: `q4_0` means the format."""
    key = name.lower()
    plain = key.removeprefix(MOSTLY)
    if plain in MIXTURES:
        return plain, MIXTURES[plain]
    return (key, MIXTURES[key]) if key in MIXTURES else None


def format_name(name: str) -> str:
    """Returns the canonical name of a format or a mixture; raises InputError for an unknown name."""
    if found := find_mixture(name):
        return found[0]
    try:
        return dtype(name).name
    except InputError as error:
        known = [*sorted(PLAIN), *sorted(GGUF_BLOCKS), *MIXTURES]
        raise InputError(
            "unknown dtype", field="dtype", value=name, allowed=one_of(known), fix=near(name.lower()[:80], known)
        ) from error


def held(spec: Part, name: str, *, joined: bool = False) -> Held:
    """Returns a function from (path, weight, part) to the bytes of that weight, for a format or a mixture.

    `joined` means that files of the model store q, k and v fused. Raises InputError for an unknown name, and for a
    mixture of a model for which llama.cpp has other rules.
    """
    found = find_mixture(name)
    if found is None:
        plain = dtype(format_name(name))
        return lambda path, weight, owner: plain.nbytes(weight)
    types = formats(spec, *found, joined=joined)
    return lambda path, weight, owner: dtype(types[path]).nbytes(weight)


def formats(spec: Part, name: str, mixture: Mixture, *, joined: bool = False) -> dict[str, str]:
    """Returns the format of every weight, by path; see `held`."""
    if not isinstance(spec, Model) or "tokens" not in spec.reads or "source" in spec.reads:
        raise InputError(
            "this mixture applies only to text models without an encoder",
            field="dtype",
            value=name,
            fix="name one format, such as q4_k or q8_0",
        )
    slots = {path: _slot(path, weight, owner, joined) for path, weight, owner in weights(spec)}
    layers = {path: int(found[1]) for path in slots if (found := BLOCK.match(path))}
    attending = sorted({layers[path] for path, slot in slots.items() if path in layers and slot in ("v", "qkv")})
    parts = [part for _, part in walk(spec)]
    experts = max((part.n_experts for part in parts if isinstance(part, MixtureOfExperts)), default=1)
    groups = max((part.queries_per_key for part in parts if isinstance(part, Mixer)), default=1)
    tied = "head" not in slots.values()
    types = {}
    for path, weight, _ in weights(spec):
        slot, i, n = slots[path], layers.get(path, 0), len(spec.blocks)
        if slot in ("v", "qkv"):
            i, n = attending.index(i), len(attending)
        place = Place(i=i, n=n, groups=groups, experts=experts)
        types[path] = _type(mixture, "head" if tied and slot == "table" else slot, place, weight, len(spec.blocks))
    return types


def _slot(path: str, weight: Weight, owner: Part, joined: bool) -> str:
    """Returns the name of a weight in the rules."""
    if path.startswith(("vision.", "hearing.")):  # a separate file, published in 16 bits
        return "vision"
    if len(weight.shape) < 2 or weight.role not in QUANTISED_ROLES or owner.kind == "router":
        return "plain"
    if owner.kind == "embedding":
        return "table" if isinstance(owner, TokenEmbedding | Linear) else "plain"
    if isinstance(owner, Head):
        return "head"
    name = next(name for name in reversed(path.split(".")) if name != "weight")
    if owner.kind == "attention" and joined and name in ("q", "k", "v"):
        return "qkv"
    return name


def _type(mixture: Mixture, slot: str, place: Place, weight: Weight, layers: int) -> str:
    if slot in ("plain", "vision"):
        return "fp32" if slot == "plain" else "fp16"
    if slot == "head":
        whole = weight.shape[-1] % dtype(mixture.base).block == 0
        return mixture.head if whole else "q8_0"
    if slot == "table":
        return mixture.table or mixture.base
    if "expert" in mixture.picks:
        return "mxfp4" if len(weight.shape) > 2 else mixture.base
    if place.experts == 8 and slot in ("k", "v", "o") and (found := _of_eight(mixture, slot)):
        return found
    pick = mixture.picks.get(slot)
    chosen = (pick(place) if pick else None) or mixture.base
    large = layers == 80 and place.groups > 1  # llama.cpp's test for a 70B model
    return "q5_k" if slot == "v" and large and not mixture.low and chosen in ("q3_k", "q4_k") else chosen


def _of_eight(mixture: Mixture, slot: str) -> str | None:
    """Returns the format with eight experts: attention is then a small part, and gets more bits."""
    if mixture.low:
        return {"k": "q4_k", "o": "q5_k"}.get(slot)
    if slot == "o":
        return "q5_k" if mixture.o8 else mixture.base
    return "q8_0"
