"""The harness notices: every field of the spec and every weight, changed in turn, breaks parity or is refused."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from harness import (
    SEED,
    ParityCase,
    Trace,
    asbuilt_loads,
    compare,
    ours,
    random_tokens,
    theirs,
    transformers_loads,
    transformers_saves,
)
from mutate import Mutation, all_fields, mutations

from asbuilt.errors import InputError
from asbuilt.nn.modules import Model

# Fields that cannot change an output, and why; exactly these.
INERT = {
    "name": "is printed",
    "max_positions": "bounds what may be asked, not what is computed",
}


def _exchanged(case: ParityCase, variant: str, folder: Path) -> tuple[Model, torch.Tensor, Trace]:
    """Returns our model of what transformers saved, a text, and what transformers makes of it."""
    rng = case.random(variant, "mutations")
    transformers_saves(case.config(variant), rng.randrange(2**32), folder)
    mine = asbuilt_loads(folder)
    tokens = random_tokens(rng, mine.spec.embedding.n_vocab)
    want = theirs(transformers_loads(folder), tokens)
    assert compare(ours(mine, tokens), want).first is None
    return mine, tokens, want


def test_every_field_matters(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """Every other value of a field is refused, or is computed and differs, though not before the mutated block."""
    mine, tokens, want = _exchanged(case, variant, tmp_path)
    outcomes: dict[str, list[str]] = {}
    for mutation in mutations(mine.spec):
        outcomes.setdefault(mutation.where, []).append(_outcome(mutation, tmp_path, tokens, want))
    assert all_fields(mine.spec) <= outcomes.keys()
    unseen = {where for where, found in outcomes.items() if "same" in found}
    assert unseen == set(INERT), f"PARITY_SEED={SEED} draws it again"
    early = {where: found for where, found in outcomes.items() if any(first < _block(where) for first in _at(found))}
    assert not early, "differs before the mutated block"


def _outcome(mutation: Mutation, folder: Path, tokens: torch.Tensor, want: Trace) -> str:
    """Returns "refused", "same", or the first path that differs."""
    try:
        mutated = asbuilt_loads(folder, mutation.make())
    except InputError:
        return "refused"
    return compare(ours(mutated, tokens), want).first or "same"


def _at(outcomes: list[str]) -> list[float]:
    return [_block(outcome) for outcome in outcomes if outcome not in ("refused", "same")]


def _block(path: str) -> float:
    """The number of the block that a path lies in; -1 for what comes before all blocks, infinity for what comes after.

    The stream after the last block is seen only through the final norm, so that counts as every block.
    """
    head, _, rest = path.partition(".")
    if head == "blocks":
        return int(rest.split(".")[0]) if rest else -1
    return math.inf if head in ("norm", "head") else -1


def test_every_weight_matters(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """One part in a hundred of noise on any one tensor breaks parity."""
    mine, tokens, want = _exchanged(case, variant, tmp_path)
    generator = torch.Generator().manual_seed(case.random(variant, "noise").randrange(2**32))
    unseen = set()
    for path, parameter in mine.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.01 * kept.std() * torch.randn(kept.shape, generator=generator)
            if compare(ours(mine, tokens), want).first is None:
                unseen.add(path)
            parameter.copy_(kept)
    assert compare(ours(mine, tokens), want).first is None
    inert = {path for path, _ in mine.named_parameters() if path.endswith(tuple(case.inert_weights))}
    assert unseen == inert, f"PARITY_SEED={SEED} draws it again"


def test_what_is_no_number_differs(case: ParityCase, variant: str, tmp_path: Path) -> None:
    _, _, want = _exchanged(case, variant, tmp_path)
    spoilt = want | {"head": torch.full_like(want["head"], math.nan)}
    found = compare(spoilt, want)
    assert (found.first, found.worst) == ("head", math.inf)
