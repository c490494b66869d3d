"""The harness notices: every field of the spec and every weight, changed in turn, breaks parity or is refused."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import (
    BATCH,
    SEED,
    TOKENS,
    TOLERANCE,
    Inputs,
    ParityCase,
    Trace,
    asbuilt_loads,
    cacheable,
    compare,
    transformers_loads,
    transformers_saves,
)
from mutate import Mutation, all_fields, mutations

from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.nn.model import Model
from asbuilt.spec import Mamba2, Part, Rotary, stored_weights, walk
from asbuilt.spec import Model as ModelSpec

# Fields that cannot change an output, and why; exactly these.
INERT = {
    "name": "is printed",
    "max_positions": "bounds what may be asked, not what is computed",
}


def _exchanged(case: ParityCase, variant: str, folder: Path) -> tuple[Model, Inputs, Trace]:
    """Returns our model of what transformers saved, inputs, and what transformers makes of them."""
    rng = case.random(variant, "mutations")
    transformers_saves(case.config(variant), rng.randrange(2**32), folder, case.kind)
    mine = asbuilt_loads(folder, kind=case.kind)
    inputs = case.kind.inputs(rng, mine.spec)
    other = transformers_loads(folder, kind=case.kind)
    want = _seen(partial(case.kind.theirs, other), mine.spec, inputs)
    assert compare(_seen(partial(case.kind.ours, mine), mine.spec, inputs), want).first is None
    return mine, inputs, want


def _seen(trace: Callable[[Inputs], Trace], spec: ModelSpec, inputs: Inputs) -> Trace:
    """The text, and before it its first half where what is computed depends on the length."""
    asks = any(isinstance(part, Rotary) and part.depends_on_length for _, part in walk(spec))
    if cacheable(spec) == TOKENS and not asks:
        return trace(inputs)
    half, whole = trace({name: given[:, : TOKENS // 2] for name, given in inputs.items()}), trace(inputs)
    return {path: torch.cat((half[path], whole[path]), 1) for path in whole}


def test_every_field_matters(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """Every other value of a field is refused, or is computed and differs, though not before the mutated block.

    Of equal parts of several blocks one is drawn.
    """
    mine, inputs, want = _exchanged(case, variant, tmp_path)
    stored, drawn = _stored(case.family, mine.spec), _one_of_equals(mine.spec, case.random(variant, "blocks"))
    outcomes: dict[str, list[str]] = {}
    for mutation in mutations(mine.spec):
        if mutation.where.rpartition(".")[0] in drawn:
            found = _outcome(case, mine.spec, stored, mutation, tmp_path, inputs, want)
            outcomes.setdefault(mutation.where, []).append(found)
    assert {where for where in all_fields(mine.spec) if where.rpartition(".")[0] in drawn} <= outcomes.keys()
    # what is remembered is seen in decoding alone, a name for it where a later layer reads it
    names = (".cached", ".caches_input")
    passed = {where for where in outcomes if where.endswith(names) or where.startswith(case.idle)}
    # a little more epsilon may change no choice
    passed |= {
        where for where in outcomes if where.endswith("norm.eps") and any(name in where for name in case.choosing)
    }
    unseen = {where for where, found in outcomes.items() if "same" in found} - passed
    known = (_inert(mine.spec) | case.inert_fields.keys()) & outcomes.keys()
    inert = {where for where in known if set(outcomes[where]) != {"refused"}}  # an image is all of a context
    assert unseen == inert - passed, f"PARITY_SEED={SEED} draws it again"
    early = {where: found for where, found in outcomes.items() if any(first < _block(where) for first in _at(found))}
    assert not early, "differs before the mutated block"


def _one_of_equals(spec: ModelSpec, rng: random.Random) -> set[str]:
    """Returns the paths of one part among those that are equal but for the number of their block, drawn."""
    equal: dict[tuple[str, Part], list[str]] = {}
    for path, part in walk(spec):
        equal.setdefault((re.sub(r"\d+", "*", path), part), []).append(path)
    return {rng.choice(paths) for paths in equal.values()}


def _inert(spec: ModelSpec) -> set[str]:
    """`INERT` of the model and of an encoder within it, and epsilons of Mamba-2 where it has no norm."""
    stacks = [path for path, part in walk(spec) if isinstance(part, ModelSpec)]
    normless = {f"{path}.eps" for path, part in walk(spec) if isinstance(part, Mamba2) and part.gate == "no_norm"}
    return {f"{path}.{name}" if path else name for path in stacks for name in INERT} | normless


Stored = set[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]


def _outcome(
    case: ParityCase, spec: ModelSpec, stored: Stored, mutation: Mutation, folder: Path, inputs: Inputs, want: Trace
) -> str:
    """Returns "refused", "same", or the first path that differs.

    Other shapes or `stored` names must be refused, equal ones must not.
    """
    try:
        mutated = mutation.make()
        same = _stored(case.family, mutated) == stored
    except InputError:
        return "refused"
    if not same:
        with pytest.raises(InputError):
            asbuilt_loads(folder, mutated, case.kind)
        return "refused"
    trace = partial(case.kind.ours, asbuilt_loads(folder, mutated, case.kind))
    try:
        made = _seen(trace, spec, inputs)
        # of layers that share weights one may be missing
        return "blocks" if list(made) != list(want) else compare(made, want).first or "same"
    except (InputError, IndexError):  # images whose places are not in the text, or are no tokens of the table
        return "refused"


def _stored(family: str, spec: ModelSpec) -> Stored:
    """The names of stored tensors, each with the shapes that the model has of it."""
    shapes = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    entries = tensor_table(family, spec).entries
    return {(entry.names, tuple(shapes[path] for path in entry.paths)) for entry in entries}


def _at(outcomes: list[str]) -> list[float]:
    return [_block(outcome) for outcome in outcomes if outcome not in ("refused", "same")]


def _block(path: str) -> float:
    """The number of the block that a path lies in; -1 for what comes before all blocks, infinity for what comes after.

    The stream after the last block is seen only through the final norm, so that counts as every block.
    """
    head, _, rest = path.partition(".")
    if head == "blocks":
        return int(rest.split(".")[0]) if rest else -1
    return math.inf if head in ("norm", "head", "pooler") else -1


def test_every_weight_matters(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """One part in a hundred of noise on any one parameter breaks parity, and the other sign on any buffer.

    What only chooses, as buffers do, gets as much noise as it has spread.
    """
    mine, inputs, want = _exchanged(case, variant, tmp_path)
    generator = torch.Generator().manual_seed(case.random(variant, "noise").randrange(2**32))
    unseen, seen_by = set(), partial(case.kind.ours, mine)
    for path, parameter in mine.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            noise = torch.randn(kept.shape, generator=generator)
            share = 1.0 if any(name in path for name in case.choosing) else 0.01
            parameter += share * kept.std() * noise if kept.numel() > 1 else 0.01  # one number has no spread
            if compare(_seen(seen_by, mine.spec, inputs), want).first is None:
                unseen.add(path)
            parameter.copy_(kept)
    for path, buffer in mine.named_buffers():  # they only decide, so little noise need not show
        kept = buffer.clone()
        buffer.copy_(-kept if kept.is_floating_point() else kept.roll(1, 0))
        if compare(_seen(seen_by, mine.spec, inputs), want).first is None:
            unseen.add(path)
        buffer.copy_(kept)
    assert compare(_seen(seen_by, mine.spec, inputs), want).first is None
    ends = tuple(case.inert_weights) if case.inert_in is None or variant in case.inert_in else ()
    inert = {path for path, _ in mine.named_parameters() if path.endswith(ends)}
    inert |= {path for path, _ in mine.named_parameters() if path.startswith(case.idle)}
    assert unseen == inert, f"PARITY_SEED={SEED} draws it again"


@pytest.mark.parametrize("wrong", [2 * TOLERANCE, -2 * TOLERANCE, math.nan, math.inf])
def test_one_wrong_number_is_found(wrong: float) -> None:
    want = {path: torch.randn(BATCH, TOKENS, 7).clamp(min=-1, max=1) for path in ("embedding", "blocks.0", "head")}
    have = {path: tensor.clone() for path, tensor in want.items()}
    at = torch.randint(BATCH, ()), torch.randint(TOKENS, ()), torch.randint(7, ())
    have["blocks.0"][at] += wrong
    assert compare(want, want).worst == 0.0
    found = compare(have, want)
    assert (found.first, found.where) == ("blocks.0", f"blocks.0 at token {int(at[1])}")
