"""What a recipe would take on a machine: the training plan of its model, batch and precision."""

from __future__ import annotations

from asbuilt.catalog.machine import Machine
from asbuilt.plan.train import TrainPlan, train
from asbuilt.spec import Model
from asbuilt.train.loss import CHUNK
from asbuilt.train.recipe import Recipe

OPTIMIZERS = {"sgd": "sgd-momentum"}  # the plan's name, where it is another


def planned(recipe: Recipe, spec: Model, machine: Machine) -> TrainPlan:
    """Returns the plan of a recipe's whole run on one device."""
    data, step = recipe.data, recipe.step
    targets = data.batch * data.context
    rows = step.loss_rows or max(1, CHUNK // spec.n_vocab)
    return train(
        spec,
        machine,
        seq=data.context,
        batch=data.batch,
        accumulate=step.accumulate,
        optimizer=OPTIMIZERS.get(recipe.optimizer.name, recipe.optimizer.name),
        dtype="fp32",  # of weights, gradients and state; autocast narrows products alone
        checkpointing=step.checkpointing,
        chunked_loss=max(1, -(-targets // rows)),
        tokens=float(recipe.run.steps * step.accumulate * targets),
    )
