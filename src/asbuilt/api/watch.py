"""What looks at a run while it goes, where the recipe asks for it: a plot, samples, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from asbuilt import plots
from asbuilt.errors import InputError
from asbuilt.generate.sampling import Sampling
from asbuilt.generate.text import complete
from asbuilt.train.loop import LOG, Progress, Report, Run
from asbuilt.train.recipe import Recipe, to_dict

PLOT = "training"
Add = Callable[[str, float, int], object]


def watchers(recipe: Recipe) -> Iterator[Report]:
    """Yields what is called with each line of the log; raises InputError for a package that is not installed."""
    given, folder = recipe.run, Path(recipe.run.out)
    if given.plot:
        _required("matplotlib", "run.plot", "pip install 'asbuilt[plots]'")
        yield Plotting(folder / LOG, folder / f"{PLOT}.{given.plot}")
    if given.tensorboard:
        board = _required("torch.utils.tensorboard", "run.tensorboard", "pip install tensorboard")
        yield Numbers(lambda: board.SummaryWriter(str(folder / "tensorboard")).add_scalar)
    if given.wandb:
        wandb = _required("wandb", "run.wandb", "pip install wandb")

        def begin() -> Add:
            started = wandb.init(project=given.wandb, dir=str(folder), config=to_dict(recipe))
            return lambda name, value, step: started.log({name: value}, step=step)

        yield Numbers(begin)


def _required(module: str, field: str, fix: str) -> Any:  # noqa: ANN401  a module
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"needs {module}, which is not installed", field=field, fix=fix) from error


class Plotting:
    """Draws the losses and the learning rate again after each validation, and at the last step."""

    def __init__(self, log: Path, picture: Path) -> None:
        self.log, self.picture = log, picture

    def __call__(self, at: Progress) -> None:
        """Draws, if there is something new."""
        if at.validation is not None or at.step == at.steps:
            plots.save_run(self.log, self.picture)


class Numbers:
    """Passes the numbers of each line of the log on, by name and step."""

    def __init__(self, begin: Callable[[], Add]) -> None:
        self.begin: Callable[[], Add] = cache(begin)  # not before the run's folder is its own

    def __call__(self, at: Progress) -> None:
        """Passes them on."""
        for name, value in vars(at).items():
            if name not in ("step", "steps") and isinstance(value, int | float):
                self.begin()(name, value, at.step)


def sample(run: Run) -> str:
    """Returns what the model writes after the recipe's prompt: always with the same seed, apart from the run's own."""
    given, tokenizer = run.recipe.run, run.vocabulary.tokenizer
    assert tokenizer is not None
    sampling = Sampling(temperature=given.sample_temperature, seed=given.seed)
    return "".join(complete(run.model, tokenizer, given.prompt, max_new_tokens=given.sample_tokens, sampling=sampling))
