"""`asbuilt.train(recipe)`: a run from a recipe to an exported model."""

from __future__ import annotations

from pathlib import Path

from asbuilt.train import loop, start
from asbuilt.train import recipe as recipes
from asbuilt.train.recipe import Recipe


def train(
    recipe: Recipe | str | Path,
    *changes: str,
    resume: bool = False,
    report: loop.Report = lambda _: None,
) -> loop.Outcome:
    """Trains by a recipe: one read already, a TOML file, or a shipped one by name, with `key=value` changes.

    `report` is called with every logged step and validation. Raises InputError as `asbuilt.train.loop.run` does.
    """
    if not isinstance(recipe, Recipe):
        recipe = recipes.read(recipe, changes)
    elif changes:
        recipe = recipes.loads(recipes.dumps(recipe), changes=changes)
    return start.run(recipe, resume=resume, report=report)
