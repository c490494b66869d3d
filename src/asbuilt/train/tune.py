"""Fine-tuning: adapters beside a frozen checkpoint, the data of chats and preferences, and what a run exports.

Everything but an adapter's A and B is frozen, whatever the spec declares as learned, so the optimizer has state of them
alone. A starts uniform in +-1 / sqrt(d_in) and B at zero, as in PEFT: the model starts as the checkpoint, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from asbuilt.checkpoint.load import Contents, load_contents
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading
from asbuilt.nn.model import Model
from asbuilt.plan.train.shares import ADAPTER
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import adapted
from asbuilt.spec.part import weights
from asbuilt.train.batch import Batch
from asbuilt.train.chats import Answers, Pair, Preferred, Row, Writer, read_chats, read_pairs, with_reference
from asbuilt.train.data import PairData, shuffled
from asbuilt.train.draws import drawing
from asbuilt.train.preferences import answer_log_probabilities
from asbuilt.train.step import casting
from asbuilt.train.text import Vocabulary

if TYPE_CHECKING:
    from asbuilt.train.recipe import Recipe
    from asbuilt.train.tune_settings import Tune

R = TypeVar("R")


def tuned_contents(source: Source | str | Path, tune: Tune, seed: int) -> Contents:
    """Returns a checkpoint with new adapters, its blocks packed for QLoRA; reads only headers.

    Raises InputError for targets that the model does not have, and a checkpoint without blocks for QLoRA.
    """
    opened = source if isinstance(source, Source) else open_model(source, weights=True)
    made = Contents(opened, packed=tune.kind == "qlora")
    try:
        made.spec = adapted(made.spec, tune.rank, tune.alpha, tune.targets or None)
    except InputError as error:
        field = f"tune.{error.field}"  # the recipe's name of it
        raise InputError(error.problem, field=field, value=error.value, allowed=error.allowed, fix=error.fix) from error
    made.adapter = started(made.spec, seed)
    return made


def started(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Returns A and B of every new adapter, by path: each A depends on the seed and its place alone."""
    made = {}
    for path, shape in ((path, weight.shape) for path, weight, _ in weights(spec) if path.endswith(ADAPTER)):
        if path.endswith(ADAPTER[0]):
            bound = shape[-1] ** -0.5
            made[path] = torch.empty(shape).uniform_(-bound, bound, generator=drawing(seed, path))
        else:
            made[path] = torch.zeros(shape)
    return made


def tuned_model(source: Source | str | Path, tune: Tune, seed: int) -> Model:
    """Returns a checkpoint's model in float32, to be trained: all of it, or new adapters alone."""
    if not tune.adapters:
        opened = source if isinstance(source, Source) else open_model(source, weights=True)
        return load_contents(Contents(opened), "float32").train()
    model = load_contents(tuned_contents(source, tune, seed), "float32").train()
    freeze_all_but_adapters(model)
    return model


def freeze_all_but_adapters(model: Model) -> None:
    """Has only the adapters' A and B trained from now on."""
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path.endswith(ADAPTER))


def base_spec(recipe: Recipe, reading: Reading) -> ModelSpec:
    """Returns what adapters are added to: the model, for QLoRA with its blocks packed; reads only headers."""
    if recipe.tune.kind != "qlora":
        return reading.spec
    return Contents(open_model(recipe.model.source, weights=True), packed=True).spec


def chat_data(recipe: Recipe) -> tuple[PairData[Row] | PairData[Pair], Vocabulary, str]:
    """Returns the data of chats or preferences, the checkpoint's tokenizer, and what was cut, in words."""
    source = open_model(recipe.model.source, weights=recipe.model.weights)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="model.source", value=recipe.model.source)
    given, writer = recipe.data, Writer.of(tokenizer, source.eos_ids)
    vocabulary = Vocabulary(tokenizer=tokenizer, source=source)
    if given.chat:
        rows, cut = read_chats(Path(given.chat), writer, given.context)
        return _divided(rows, Answers(), recipe), vocabulary, cut.note
    pairs, cut = read_pairs(Path(given.preferences), writer, given.context)
    return _divided(pairs, Preferred(recipe.tune.beta, recipe.tune.smoothing), recipe), vocabulary, cut.note


def _divided(rows: list[R], objective: Callable[[Sequence[R]], Batch], recipe: Recipe) -> PairData[R]:
    """Returns the rows as data, of which those at the end are only validated on."""
    at = len(rows) - int(len(rows) * recipe.data.validation)
    return PairData(
        pairs=rows[:at],
        held_out=rows[at:],
        objective=objective,
        batch_size=recipe.data.batch,
        seed=recipe.run.seed,
    )


@torch.no_grad()
def referred(
    data: PairData[Pair],
    model: Model,
    batches: int,
    *,
    rows: int | None = None,
    autocast: torch.dtype | None = None,
) -> PairData[Pair]:
    """Returns the data with ln p of the answers under the model as it is, of the pairs that so many batches read."""
    n = len(data.pairs)
    read = {shuffled(number, n, data.seed) for number in range(min(batches * data.batch_size, n))}

    def measured(pairs: list[Pair]) -> list[Pair]:
        made: list[Pair] = []
        for first in range(0, len(pairs), data.batch_size):
            some = pairs[first : first + data.batch_size]
            batch = data.objective(some).to(model.device)
            with casting(model, autocast):
                chosen, rejected = answer_log_probabilities(model, batch, rows=rows).chunk(2)
            both = zip(some, chosen.tolist(), rejected.tolist(), strict=True)
            made += [with_reference(pair, c, r) for pair, c, r in both]
        return made

    order = sorted(read)
    found = dict(zip(order, measured([data.pairs[i] for i in order]), strict=True))
    pairs = [found.get(i, pair) for i, pair in enumerate(data.pairs)]
    return replace(data, pairs=pairs, held_out=measured(list(data.held_out)))
