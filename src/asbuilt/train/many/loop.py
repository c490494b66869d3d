"""A run by many processes: the loop of one, with its batches, checkpoints and model divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asbuilt.errors import InputError
from asbuilt.nn.build import build, stored_tensors
from asbuilt.nn.model import Model
from asbuilt.train import loop
from asbuilt.train import recipe as recipes
from asbuilt.train.device import HOST
from asbuilt.train.export import export
from asbuilt.train.loop import LOG, STATES, Outcome, Report, Run, Sample
from asbuilt.train.many.divide import divide, reshard
from asbuilt.train.many.group import Group, joined, restarted
from asbuilt.train.many.state import kept, load_state, save_state, whole
from asbuilt.train.recipe import Recipe
from asbuilt.train.state import changing, checkpoints
from asbuilt.train.step import Stepped
from asbuilt.train.tune import tuned_model


def run(
    recipe: Recipe, *, resume: bool = False, report: Report = lambda _: None, sample: Sample | None = None
) -> Outcome:
    """Trains as `asbuilt.train.loop.run` does, as one of the processes that torchrun has started.

    The first rank alone reports, and writes log and model. What torchrun starts again after a lost process goes on from
    the last checkpoint. Raises InputError also if the processes cannot be arranged as the recipe says.
    """
    resume = resume or (restarted() and Path(recipe.run.out).is_dir())
    with joined(recipe) as group:
        last = group.agree(partial(beginning, recipe, resume))
        divided = partial(divide, group=group, vocabulary=recipe.parallel.vocabulary)
        made = loop.prepare(recipe, divided, group.device)
        made.ranks = group
        if last is not None:
            made.position = load_state(Path(last), made.model, made.optimizer, group)
        if resume and group.first:
            loop.cut_log(made.folder / LOG, -1 if last is None else made.position.step)
        return Loop(made, report if group.first else _unsaid, group, sample).finish()


def beginning(recipe: Recipe, resume: bool) -> str | None:
    """Returns the checkpoint that a run goes on from; raises InputError if it cannot begin as asked."""
    loop.require_startable(recipe, resume=resume)
    found = loop.last_checkpoint(recipe) if resume else None
    return None if found is None else str(found)


class Loop(loop.Loop):
    """The loop of one process of many."""

    def __init__(self, made: Run, report: Report, group: Group, sample: Sample | None = None) -> None:
        super().__init__(made, report, sample)
        self.group = group

    def stepped(self) -> Stepped:
        """Makes one step; raises Lost if another process is gone."""
        try:
            return super().stepped()
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(error) from error

    def validate(self) -> float | None:
        """Returns the mean loss of the validation text."""
        found = super().validate()
        reshard(self.run.model)
        return found

    def write_state(self, states: Path) -> None:
        """Writes the checkpoint of this step, of this rank its part."""
        one = self.run
        save_state(states, one.model, one.optimizer, one.position, recipes.to_dict(one.recipe), self.group)

    def export(self) -> None:
        """Writes the trained model on the first rank, which reads it from the last checkpoint: no rank has it whole."""
        one = self.run
        if self.group.first:
            weights = whole(checkpoints(one.folder / STATES)[-1], weights_alone=True)
            export(one.recipe, self._whole(weights), one.reading, one.vocabulary)
        dist.barrier()

    @torch.no_grad()
    def write(self, sample: Sample) -> str:
        """Returns what the model writes on the first rank, which gathers it on its host; the others wait."""
        weights, written = {}, ""
        for path, tensor in kept(self.run.model).items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # by all ranks
            if self.group.first:
                weights[path] = gathered.to(HOST)
        if self.group.first:
            written = sample(replace(self.run, model=self._whole(weights).eval()))
        dist.barrier()
        return written

    @torch.no_grad()
    def _whole(self, weights: Mapping[str, Tensor]) -> Model:
        """Returns the model of one process, on its host, with these weights: with adapters those that they are."""
        recipe, tune = self.run.recipe, self.run.recipe.tune
        if tune.adapters:
            model = tuned_model(recipe.model.source, tune, recipe.run.seed)
        else:
            model = build(self.run.reading.spec, seed=None)
        for path, tensor in (changing(model) if tune.adapters else stored_tensors(model)).items():
            tensor.copy_(weights[path])
        return model

    def _lost(self, error: Exception) -> Exception:
        """Returns the error to raise if another process is gone, else the one given."""
        said = str(error)
        if not isinstance(error, dist.DistError) and not any(word in said for word in LOST):
            return error
        kept = checkpoints(self.run.folder / STATES)
        last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        return InputError(
            f"another process of the run was lost in step {self.run.position.step + 1}: {said.splitlines()[0]}",
            field=str(self.run.folder),
            fix=f"start it again with --resume, or torchrun with --max-restarts; {last}",
        )


# What gloo says when another process is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Connect failure")


def _unsaid(at: loop.Progress) -> None:
    """Reports nothing."""
