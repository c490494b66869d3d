"""What a recipe would take on a machine: the training plan of its model, batch and precision."""

from __future__ import annotations

import math

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError
from asbuilt.plan.train import TrainPlan, train
from asbuilt.spec import Model
from asbuilt.train.device import HOST
from asbuilt.train.divisible import (
    copies,
    require_context,
    require_shares,
    require_spread,
    require_stages,
    tensor_share,
)
from asbuilt.train.loss import chunk_rows
from asbuilt.train.offload import require_apart
from asbuilt.train.recipe import Recipe
from asbuilt.train.settings import Precision

OPTIMIZERS = {"sgd": "sgd-momentum"}  # the plan's name, where it is another


def planned(recipe: Recipe, spec: Model, machine: Machine, *, narrow: bool = False) -> TrainPlan:
    """Returns the plan of a recipe's whole run on its `parallel.ranks`, each of them such a machine.

    Adapters are added to the spec. A chat is counted as if it had all of `context`, a pair of answers as two of them,
    and the text of an image too. It is of float32, or if `narrow` of weights in bfloat16, for the time of products that
    autocast narrows.
    """
    data, step, tune, given = recipe.data, recipe.step, recipe.tune, recipe.parallel
    paired = data.objective == "contrastive"
    ranks, shares = ranks_of(recipe), shares_of(recipe)
    if paired and ranks > 1:  # a rank would have to see the pairs of all
        raise InputError("needs a process alone", field="parallel.ranks", value=ranks, allowed="1")
    if step.offload and machine.kind == "cpu":
        require_apart(HOST)
    own = tensor_share(spec, given.tensor, given.vocabulary)
    require_spread(spec, given.expert)
    require_stages(spec, recipe)
    require_context(spec, recipe)
    batch = data.batch * given.context // shares * (2 if data.preferences else 1)
    targets = batch * data.context // given.context  # of a rank
    rows = targets if paired else step.loss_rows or chunk_rows(own.n_vocab)
    return train(
        spec,
        machine,
        seq=data.context,
        batch=batch,
        gpus=ranks,
        tp=given.tensor,
        pp=given.pipeline,
        interleave=given.interleave,
        ep=given.expert,
        cp=given.context,
        gather_context=given.context > 1,
        sequence_parallel=False,
        divide_vocabulary=given.vocabulary,
        zero=0 if ranks == 1 else 3,
        hsdp=given.shard if 0 < given.shard < shares else None,
        accumulate=step.accumulate,
        optimizer=OPTIMIZERS.get(recipe.optimizer.name, recipe.optimizer.name),
        dtype="bf16" if narrow else "fp32",  # of weights, gradients and state; autocast narrows products alone
        gradient_dtype="fp32",
        checkpointing=step.checkpointing,
        documents=data.document_mask,
        offload="optimizer" if step.offload else "none",
        chunked_loss=max(1, -(-targets // rows)),
        loss="pytorch" if paired else "asbuilt",  # pairs have a loss of their own
        lora=tune.rank if tune.adapters else None,
        targets=(tune.targets or None) if tune.adapters else None,
        tokens=float(recipe.run.steps * step.accumulate * (batch if paired else targets) * shares),
    )


def ranks_of(recipe: Recipe) -> int:
    """Returns the processes that a recipe asks for: as many as it must have, if it does not say."""
    given = recipe.parallel
    return given.ranks or given.tensor * given.pipeline * math.lcm(given.context, given.expert)


def likely(recipe: Recipe, machine: Machine) -> Precision:
    """Returns the precision of the run's products; where the run is to choose, the one of the higher rate."""
    if recipe.step.precision != "auto":
        return recipe.step.precision
    faster = machine.rates.get("bf16", 0.0) > machine.rates.get("fp32", 0.0)
    return "bf16" if faster else "fp32"


def shares_of(recipe: Recipe) -> int:
    """Returns into how many shares a batch is divided; raises InputError if they are not equal."""
    given = recipe.parallel
    ranks = ranks_of(recipe)
    shares = copies(recipe, ranks)
    if given.shard and shares % given.shard:
        raise InputError(field="parallel.shard", value=given.shard, allowed=f"0 or a divisor of {shares}")
    if shares % given.expert:
        allowed = f"a divisor of the {shares} data-parallel ranks"
        raise InputError(field="parallel.expert", value=given.expert, allowed=allowed)
    require_shares(recipe, shares)
    return shares
