"""The table of a GGUF file: the spec's paths under llama.cpp's names, in the layouts of its converter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from asbuilt.errors import InputError
from asbuilt.families.gguf.engine import Architecture, Join
from asbuilt.families.gguf.layouts import Each, PlusOne
from asbuilt.families.shared.table import AdjacentPairs, Chain, Concat, EachExpert, Entry, Layout, Same, TensorTable
from asbuilt.spec import (
    Attention,
    Block,
    LanguageModel,
    LatentAttention,
    Model,
    Parallel,
    Rotary,
    stored_weights,
)

OUTSIDE = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "positions": "position_embd",
    "types": "token_types",
    "norm": "output_norm",
    "head": "output",
    "relative": "blk.0.attn_rel_b",
}
OF_SIDE = ("norm.", "relative.")  # what encoder and decoder each have outside their blocks
ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
ATTENTION |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
BLOCK = {
    "attention.norm": "attn_norm",
    "attention.post_norm": "post_attention_norm",
    "ffn.norm": "ffn_norm",
    "ffn.post_norm": "post_ffw_norm",
    "cross.norm": "cross_attn_norm",
    "ffn.body.router": "ffn_gate_inp",
    **{f"attention.body.{part}": name for part, name in ATTENTION.items()},
    **{f"cross.body.{part}": f"cross_attn_{part}" for part in "qkvo"},
    **{f"ffn.body.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"ffn.body.shared.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
# Weights with names of their own rather than that of a map, stacks of experts first.
WHOLE = {
    **{f"ffn.body.{part}": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    **{f"ffn.body.{part}_bias": f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")},
    "ffn.body.router.correction": "exp_probs_b.bias",
    "attention.body.sinks": "attn_sinks.weight",
}
# A block whose two bodies read one norm has the names of any other.
SIDE_BY_SIDE = (
    ("parallel.body.attention.", "attention.body."),
    ("parallel.body.ffn.", "ffn.body."),
    ("parallel.norm.", "attention.norm."),
)
IGNORED = {
    r"rope_freqs\.weight": "divisors of the rotary frequencies, read into the spec",
    r"rope_factors_(long|short)\.weight": "divisors of the rotary frequencies, read into the spec",
    r"blk\.\d+\.attn_rot_embd(\.weight)?": "rotary frequencies, computed from the header",
}
PREDICTOR = {
    "embedding": "nextn.embed_tokens",
    "token_norm": "nextn.enorm",
    "stream_norm": "nextn.hnorm",
    "join": "nextn.eh_proj",
    "norm": "nextn.shared_head_norm",
    "head": "nextn.shared_head_head",
}
QKV = Join("attn_qkv", ("attention.body.q", "attention.body.k", "attention.body.v"))
GATE_UP = Join("ffn_up", ("ffn.body.gate", "ffn.body.up"))
EXPERTS_GATE_UP = Join("ffn_gate_up_exps", ("ffn.body.gate", "ffn.body.up"))


def table(architecture: Architecture, spec: Model, stored: Collection[str] = ()) -> TensorTable:
    """Returns the names and layouts of the tensors in a file of the architecture; `stored` are those it has.

    Raises InputError naming the first weight that such files have no name for.
    """
    passed = _unread_predictors(spec, stored) if architecture.predicts else {}
    return TensorTable(
        entries=tuple(_entries(architecture, spec, stored)), ignored={**IGNORED, **architecture.ignored, **passed}
    )


def _unread_predictors(spec: Model, stored: Collection[str]) -> dict[str, str]:
    """Returns what is ignored where the model was read without the prediction layers that the file has."""
    numbers = {int(found[1]) for name in stored if (found := re.match(r"blk\.(\d{1,6})\.", name))}
    later = [] if [*spec.extras()] else sorted(i for i in numbers if i >= spec.n_layers)
    return {rf"blk\.{i}\..*": "of prediction layers that are not stored whole" for i in later}


@dataclass(frozen=True)
class _Place:
    """What paths of one block begin with, what their tensors' names begin with; not of a `block`, of all else."""

    here: str
    there: str
    block: bool = False


def _entries(architecture: Architecture, spec: Model, stored: Collection[str]) -> Iterator[Entry]:
    weights = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    groups: dict[_Place, dict[str, str]] = {}  # rest of a path as of any block -> path
    for path in weights:
        place, rest = _place(architecture, path, spec)
        groups.setdefault(place, {})[rest] = path
    for place, paths in groups.items():
        more = architecture.more if place.block else None
        own = more(spec, place.here, place.there, stored) if more is not None else []
        yield from own
        left = {rest: path for rest, path in paths.items() if not any(path in entry.paths for entry in own)}
        for rests, name in _names(architecture, place, list(left), stored):
            if missing := [rest for rest in rests if rest not in left]:
                raise InputError(f"{architecture.name} files join this weight with others", field=missing[0])
            layouts = [_layout(architecture, spec, place.here, rest) for rest in rests]
            sizes = [weights[left[rest]] for rest in rests]
            yield Entry(
                paths=tuple(left[rest] for rest in rests), names=(place.there + name,), layout=_together(layouts, sizes)
            )


def _place(architecture: Architecture, path: str, spec: Model) -> tuple[_Place, str]:
    """Returns where a path is, and the rest of it as any block has it."""
    decoder, encoder = architecture.sides
    within = "encoder." * path.startswith("encoder.")
    side, path = (encoder if within else decoder), path.removeprefix(within)
    found = re.match(r"(blocks\.(\d+)\.|predictors\.(\d+)\.(block\.)?)", path)
    if found is None:
        return _Place(within, side if path.startswith(OF_SIDE) else ""), path
    number = int(found[2]) if found[2] else spec.n_layers + int(found[3])
    rest = path[found.end() :]
    for begins, usual in SIDE_BY_SIDE:
        if rest.startswith(begins):
            rest = usual + rest.removeprefix(begins)
    of_block = bool(found[2] or found[4])
    return _Place(within + found[0], f"{side}blk.{number}.", of_block), rest


def _names(
    architecture: Architecture, place: _Place, rests: list[str], stored: Collection[str]
) -> Iterator[tuple[list[str], str]]:
    """Yields (weights in one tensor, its name); those of a join together, in the join's order."""
    there = place.there
    usual = BLOCK if place.block else PREDICTOR if place.here.startswith("predictors.") else OUTSIDE
    stems = {**usual, **architecture.names}
    done = set[str]()
    for rest in rests:
        if rest in done:
            continue
        stem, _, kind = rest.rpartition(".")
        joined = _join(architecture, there, rest, stored) if place.block else None
        if joined is not None:
            join, ending = joined
            together = [part + ending for part in join.parts]
            name = f"{join.name}{ending or '.weight'}"
        elif place.block and rest in WHOLE:
            together, name = [rest], WHOLE[rest]
        elif stem in stems:
            together, name = [rest], f"{stems[stem]}.{kind}"
        else:
            raise InputError(f"{architecture.name} files have no name for this weight", field=rest)
        done.update(together)
        yield together, name


def _join(architecture: Architecture, there: str, rest: str, stored: Collection[str]) -> tuple[Join, str] | None:
    """Returns the join that a weight lies in, and how the names of its parts end after the map's; None for none.

    Where a file has a map that usually lies in a join under the map's own name, it does not lie there.
    """
    for join in (*architecture.joined, *architecture.may_join):
        ending = next((end for end in (".weight", ".bias", "") if rest in [part + end for part in join.parts]), None)
        if ending is None or (ending == "") != join.name.endswith("_exps"):
            continue
        name, own = f"{there}{join.name}{ending or '.weight'}", f"{there}{BLOCK[join.parts[0]]}{ending}"
        if name in stored or (join in architecture.joined and own not in stored):
            return join, ending
    return None


def _together(layouts: list[Layout], shapes: list[tuple[int, ...]]) -> Layout:
    """Returns the layout of tensors that are joined along their outputs, stacks of experts expert by expert."""
    if len(layouts) == 1:
        return layouts[0]
    stacked = len(shapes[0]) == 3
    sizes = tuple(shape[1] if stacked else shape[0] for shape in shapes)
    joined: Layout = EachExpert(Concat(sizes)) if stacked else Concat(sizes)
    return joined if all(layout == Same() for layout in layouts) else Chain((Each(tuple(layouts)), joined))


def _layout(architecture: Architecture, spec: Model, here: str, rest: str) -> Layout:
    stem = rest.rpartition(".")[0]
    if architecture.plus_one and stem.endswith("norm"):
        return PlusOne()
    if not architecture.adjacent or stem not in ("attention.body.q", "attention.body.k"):
        return Same()
    attention = attention_at(spec, here)
    rotary = _rotary(spec)
    if not isinstance(attention, Attention) or rotary is None or rotary.pairing == "adjacent":
        return Same()
    return AdjacentPairs(attention.n_heads if stem.endswith("q") else attention.n_kv_heads, rotary.d_rotary)


def _rotary(spec: Model) -> Rotary | None:
    """Returns the first layer's rotation that there is: layers without one have their rows in the same order."""
    for i in range(spec.n_layers):
        positions = getattr(attention_at(spec, f"blocks.{i}."), "positions", None)
        if isinstance(positions, Rotary):
            return positions
    return None


def attention_at(spec: Model, here: str) -> Attention | LatentAttention | None:
    """Returns the attention of the block that paths begin with, None where it has none."""
    kind, number = here.split(".")[:2]
    predictors = spec.predictors if isinstance(spec, LanguageModel) else ()
    block: Block = spec.blocks[int(number)] if kind == "blocks" else predictors[int(number)].block
    bodies = [branch.body for branch in block.branches]
    inner = [body.attention if isinstance(body, Parallel) else body for body in bodies]
    return next((body for body in inner if isinstance(body, Attention | LatentAttention)), None)
