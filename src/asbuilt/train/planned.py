"""What a recipe would take on a machine: the training plan of its model, batch and precision."""

from __future__ import annotations

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError
from asbuilt.plan.train import TrainPlan, train
from asbuilt.spec import Model
from asbuilt.train.divisible import tensor_share
from asbuilt.train.loss import CHUNK
from asbuilt.train.recipe import Recipe

OPTIMIZERS = {"sgd": "sgd-momentum"}  # the plan's name, where it is another


def planned(recipe: Recipe, spec: Model, machine: Machine) -> TrainPlan:
    """Returns the plan of a recipe's whole run on its `parallel.ranks`, each of them such a machine.

    Adapters are added to the spec. A chat is counted as if it had all of `context`, and a pair as two of them.
    """
    data, step, tune, given = recipe.data, recipe.step, recipe.tune, recipe.parallel
    ranks, shares = given.ranks or given.tensor, shares_of(recipe)
    own = tensor_share(spec, given.tensor, given.vocabulary)
    batch = data.batch // shares * (2 if data.preferences else 1)
    targets = batch * data.context
    rows = step.loss_rows or max(1, CHUNK // own.n_vocab)
    return train(
        spec,
        machine,
        seq=data.context,
        batch=batch,
        gpus=ranks,
        tp=given.tensor,
        sequence_parallel=False,
        divide_vocabulary=given.vocabulary,
        zero=0 if given.shard == 1 or shares == 1 else 3,
        accumulate=step.accumulate,
        optimizer=OPTIMIZERS.get(recipe.optimizer.name, recipe.optimizer.name),
        dtype="fp32",  # of weights, gradients and state; autocast narrows products alone
        checkpointing=step.checkpointing,
        chunked_loss=max(1, -(-targets // rows)),
        loss="asbuilt",
        lora=tune.rank if tune.adapters else None,
        targets=(tune.targets or None) if tune.adapters else None,
        tokens=float(recipe.run.steps * step.accumulate * targets * shares),
    )


def shares_of(recipe: Recipe) -> int:
    """Returns into how many shares a batch is divided; raises InputError if the plan knows no such division."""
    given, batch = recipe.parallel, recipe.data.batch
    ranks = given.ranks or given.tensor
    if ranks % given.tensor:
        raise InputError(field="parallel.tensor", value=given.tensor, allowed=f"a divisor of the {ranks} ranks")
    shares = ranks // given.tensor
    if given.shard not in (0, 1, shares):
        raise InputError(
            "the plan knows weights that all ranks divide, or none",
            field="parallel.shard",
            value=given.shard,
            allowed=f"0, 1 or {shares} for --dry-run",
        )
    if batch % shares:
        raise InputError(
            f"{shares} ranks share a batch equally", field="data.batch", value=batch, allowed=f"a multiple of {shares}"
        )
    return shares
