"""The table of a GGUF file: the spec's paths under llama.cpp's names, in the layouts of its converter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TypeVar

from asbuilt.errors import InputError
from asbuilt.families.gguf.engine import Architecture, Join
from asbuilt.families.gguf.layouts import Each, PlusOne
from asbuilt.families.shared.table import AdjacentPairs, Chain, Concat, EachExpert, Entry, Layout, Same, Table
from asbuilt.spec import (
    Attention,
    Block,
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
}
ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
ATTENTION |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
BLOCK = {
    "attention.norm": "attn_norm",
    "attention.post_norm": "post_attention_norm",
    "ffn.norm": "ffn_norm",
    "ffn.post_norm": "post_ffw_norm",
    "ffn.body.router": "ffn_gate_inp",
    **{f"attention.body.{part}": name for part, name in ATTENTION.items()},
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

K = TypeVar("K", bound=object)


def table(architecture: Architecture, spec: Model, stored: Collection[str] = ()) -> Table:
    """Returns the names and layouts of the tensors in a file of the architecture; `stored` are those it has.

    Raises InputError naming the first weight that such files have no name for.
    """
    passed = _unread_predictors(spec, stored) if architecture.predicts else {}
    return Table(
        entries=tuple(_entries(architecture, spec, stored)), ignored={**IGNORED, **architecture.ignored, **passed}
    )


def _unread_predictors(spec: Model, stored: Collection[str]) -> dict[str, str]:
    """Returns what is ignored where the model was read without the prediction layers that the file has."""
    numbers = {int(found[1]) for name in stored if (found := re.match(r"blk\.(\d{1,6})\.", name))}
    later = [] if spec.predictors else sorted(i for i in numbers if i >= spec.n_layers)
    return {rf"blk\.{i}\..*": "of prediction layers that are not stored whole" for i in later}


def _entries(architecture: Architecture, spec: Model, stored: Collection[str]) -> Iterator[Entry]:
    weights = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    groups: dict[tuple[str, str], dict[str, str]] = {}  # (prefix here, prefix there) -> rest as of any block -> path
    for path in weights:
        here, there, rest = _place(path, spec)
        groups.setdefault((here, there), {})[rest] = path
    for (here, there), paths in groups.items():
        of_block = here.startswith("blocks.") or here.endswith("block.")
        own = architecture.more(spec, here, there, stored) if architecture.more is not None and of_block else []
        yield from own
        left = {rest: path for rest, path in paths.items() if not any(path in entry.paths for entry in own)}
        for rests, name in _names(architecture, there, list(left), stored):
            if missing := [rest for rest in rests if rest not in left]:
                raise InputError(f"{architecture.name} files join this weight with others", field=missing[0])
            layouts = [_layout(architecture, spec, here, rest) for rest in rests]
            sizes = [weights[left[rest]] for rest in rests]
            yield Entry(
                paths=tuple(left[rest] for rest in rests), names=(there + name,), layout=_together(layouts, sizes)
            )


def _place(path: str, spec: Model) -> tuple[str, str, str]:
    """Returns what a path begins with, what its tensor's name begins with, and the rest as any block has it."""
    found = re.match(r"(blocks\.(\d+)\.|predictors\.(\d+)\.(block\.)?)", path)
    if found is None:
        return "", "", path
    number = int(found[2]) if found[2] else spec.n_layers + int(found[3])
    rest = path[found.end() :]
    for begins, usual in SIDE_BY_SIDE:
        if rest.startswith(begins):
            rest = usual + rest.removeprefix(begins)
    return found[0], f"blk.{number}.", rest


def _names(
    architecture: Architecture, there: str, rests: list[str], stored: Collection[str]
) -> Iterator[tuple[list[str], str]]:
    """Yields (weights in one tensor, its name); those of a join together, in the join's order."""
    stems = {**(BLOCK | PREDICTOR if there else OUTSIDE), **architecture.names}
    done = set[str]()
    for rest in rests:
        if rest in done:
            continue
        stem, _, kind = rest.rpartition(".")
        joined = _join(architecture, there, rest, stored)
        if joined is not None:
            join, ending = joined
            together = [part + ending for part in join.parts]
            name = f"{join.name}{ending or '.weight'}"
        elif there and rest in WHOLE:
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
    block: Block = spec.blocks[int(number)] if kind == "blocks" else spec.predictors[int(number)].block
    bodies = [branch.body for branch in block.branches]
    inner = [body.attention if isinstance(body, Parallel) else body for body in bodies]
    return next((body for body in inner if isinstance(body, Attention | LatentAttention)), None)
