"""Starting a run: by this process alone, or as one of the processes that torchrun has started."""

from __future__ import annotations

import os

from asbuilt.errors import InputError
from asbuilt.train import loop
from asbuilt.train.recipe import Recipe


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    report: loop.Report = lambda _: None,
    sample: loop.Sample | None = None,
) -> loop.Outcome:
    """Trains as the recipe says; see `asbuilt.train.loop.run`, and `asbuilt.train.many.loop.run` under torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from asbuilt.train.many.loop import run as run_many

        if recipe.tune.kind == "qlora":
            raise InputError("needs a process alone", field="tune.kind", value="qlora", allowed="full or lora")
        for name in ("tensor", "pipeline", "context", "expert"):
            asked = getattr(recipe.parallel, name)
            if asked > 1 and (recipe.tune.adapters or recipe.data.preferences):
                problem = "adapters and preferences are divided by data alone (parallel.shard)"
                raise InputError(problem, field=f"parallel.{name}", value=asked, allowed="1")
        if recipe.data.objective == "contrastive":  # a rank would have to see the pairs of all
            raise InputError(
                "needs a process alone", field="data.objective", value="contrastive", fix="leave torchrun out"
            )
        if recipe.step.precision == "auto":  # each process would time for itself
            raise InputError(
                "needs a process alone", field="step.precision", value="auto", allowed="fp32 or bf16 under torchrun"
            )
        if recipe.step.compile:
            raise InputError("needs a process alone", field="step.compile", value=True, allowed="false under torchrun")
        for name in ("norms_every", "sample_every"):  # no process has the whole model
            if asked := getattr(recipe.run, name):
                raise InputError("needs a process alone", field=f"run.{name}", value=asked, allowed="0 under torchrun")

        return run_many(recipe, resume=resume, report=report)
    for name in ("ranks", "shard", "tensor", "pipeline", "context", "expert"):
        asked = getattr(recipe.parallel, name)
        if asked > 1:
            raise InputError(
                "this process is alone",
                field=f"parallel.{name}",
                value=asked,
                fix=f"start it as torchrun --nproc-per-node {asked} -m asbuilt train ...",
            )
    return loop.run(recipe, resume=resume, report=report, sample=sample)
