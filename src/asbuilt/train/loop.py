"""A run: the loop of steps with its log, validations and checkpoints, and the exported model at its end.

OUT/recipe.toml            every setting of the run
OUT/log.jsonl              a line for each logged step and each validation
OUT/checkpoints/step-N/    the whole state after N steps (train/state.py)
OUT/model/                 the trained model, for transformers where a published family can express it
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import GENERATION_KEYS, save
from asbuilt.checkpoint.source import TOKENIZER, Source, open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading, read_config
from asbuilt.nn.build import build, initialise
from asbuilt.nn.model import Model
from asbuilt.spec.part import Gives
from asbuilt.train import recipe as recipes
from asbuilt.train.batch import Data
from asbuilt.train.experts import Routing
from asbuilt.train.optimizer import Optimizers, optimizers
from asbuilt.train.ranks import ALONE, Ranks
from asbuilt.train.recipe import Recipe
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.state import Position, checkpoints, load_state, read_recipe, remove_old, save_state
from asbuilt.train.step import NotFinite, Stepped, evaluate, train_step
from asbuilt.train.text import Vocabulary, text_data
from asbuilt.train.width import scales

RECIPE, LOG, STATES, EXPORTED = "recipe.toml", "log.jsonl", "checkpoints", "model"
# Sections and keys that a resumed run may change: what is written when, not what is computed.
FREE = ("run.out", "run.log_every", "run.validate_every", "run.save_every", "run.keep", "data.text")
FREE_SECTIONS = ("parallel",)  # which processes compute it
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
TRAINED: tuple[Gives, ...] = ("logits",)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run reports: of a step or, with a `validation`, of the model after it. Losses are nats per token."""

    step: int
    steps: int
    loss: float | None = None
    validation: float | None = None
    lr: float = 0.0
    gradient_norm: float | None = None
    fullest_expert: float | None = None
    auxiliary: float | None = None
    dropped: float | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds_left: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the last training and validation loss in nats per token, and where the model is."""

    steps: int
    tokens: int
    loss: float | None
    validation: float | None
    seconds: float
    folder: Path


Report = Callable[[Progress], None]


@dataclass(kw_only=True)
class Run:
    """Everything that a run works with; `position` moves."""

    recipe: Recipe
    model: Model
    data: Data
    optimizer: Optimizers
    reading: Reading
    vocabulary: Vocabulary
    position: Position = field(default_factory=Position)
    ranks: Ranks = ALONE

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.recipe.run.out)

    def factor(self, step: int) -> float:
        """Returns what multiplies the learning rates in a step."""
        return self.recipe.schedule.factor(step, self.recipe.run.steps)

    def step(self) -> Stepped:
        """Makes one step."""
        given, at, ranks = self.recipe.step, self.position, self.ranks
        batches = [
            self.data.batch(at.step * given.accumulate + i, ranks.number, ranks.count).to(self.model.device)
            for i in range(given.accumulate)
        ]
        made = train_step(
            self.model,
            batches,
            self.optimizer,
            factor=self.factor(at.step),
            clip=self.recipe.optimizer.clip,
            z=given.z_loss,
            rows=given.loss_rows or None,
            autocast=AUTOCAST[given.precision],
            experts=self.recipe.experts,
            ranks=ranks,
        )
        self.position = replace(at, step=at.step + 1, tokens=at.tokens + made.tokens)
        return made

    def validate(self) -> float | None:
        """Returns the mean loss of the validation text, None if there is none."""
        batches = [self.ranks.share(batch).to(self.model.device) for batch in self.data.validation()]
        if not batches:
            return None
        given = self.recipe.step
        found = evaluate(
            self.model, batches, rows=given.loss_rows or None, autocast=AUTOCAST[given.precision], ranks=self.ranks
        )
        self.position = replace(self.position, validation=found)
        return found


def prepare(recipe: Recipe, divide: Callable[[Model], None] = lambda _: None) -> Run:
    """Returns a run at its beginning: data read, model built, initialised, and divided over devices by `divide`."""
    data, vocabulary = text_data(recipe.data, recipe.run.seed)
    reading = described(recipe, vocabulary.n_vocab)
    if recipe.model.weights:
        model = load(recipe.model.source, dtype="float32").train()
    else:
        model = build(reading.spec, seed=None)
        scaled = scales(reading.spec, recipe.model.base_width)
        initialise(model, recipe.run.seed, recipe.model.std, {path: one.std for path, one in scaled.items()})
    recompute_blocks(model, recipe.step.checkpointing)
    Routing(model, recipe.experts)  # refuses losses of experts that are not there
    divide(model)
    return Run(
        recipe=recipe,
        model=model,
        data=data,
        optimizer=optimizers(model, recipe.optimizer, recipe.model.base_width),
        reading=reading,
        vocabulary=vocabulary,
    )


def described(recipe: Recipe, n_vocab: int) -> Reading:
    """Returns the reading of the recipe's model; raises InputError if it does not suit the data."""
    given = recipe.model
    if given.source:
        reading = open_model(given.source, weights=given.weights).reading
    else:
        reading = read_config({"vocab_size": n_vocab} | given.config, "model.config")
        # the defaults of published configs are tokens of other vocabularies
        reading = replace(reading, carried=dict.fromkeys(GENERATION_KEYS) | reading.carried)
    spec, context = reading.spec, recipe.data.context
    if spec.gives not in TRAINED or spec.reads != ("tokens",):
        raise InputError(
            "only language models are trained by this loop",
            field="model",
            value=spec.name,
            allowed="one that reads tokens and gives logits",
        )
    if spec.n_vocab < n_vocab:
        raise InputError(
            f"the tokenizer has {n_vocab:,} tokens", field="model: n_vocab", value=spec.n_vocab, allowed="no fewer"
        )
    if context > spec.max_positions:
        raise InputError(field="data.context", value=context, allowed=f"at most {spec.max_positions}, the model's")
    return reading


def run(recipe: Recipe, *, resume: bool = False, report: Report = lambda _: None) -> Outcome:
    """Trains as the recipe says, from the beginning or from the last checkpoint in its folder.

    Resuming continues as if the run had never stopped: the same losses, the same weights, bit by bit. Raises
    InputError for a folder that holds a run already, for settings that differ from its own, and when a loss or a
    gradient is not finite.
    """
    last = last_checkpoint(recipe) if resume else None
    if not resume:
        require_new(recipe)
    made = prepare(recipe)
    if last is not None:
        made.position = load_state(last, made.model, made.optimizer)
    if resume:
        cut_log(made.folder / LOG, -1 if last is None else made.position.step)
    return Loop(made, report).finish()


class Loop:
    """The loop of a prepared run."""

    def __init__(self, made: Run, report: Report) -> None:
        self.run, self.report, self.settings = made, report, made.recipe.run
        self.loss: float | None = None
        self._begun, self._before = time.perf_counter(), made.position
        self._paused = 0.0

    def finish(self) -> Outcome:
        """Runs all steps that are left, and exports the model."""
        one, settings = self.run, self.settings
        if one.ranks.first:
            one.folder.mkdir(parents=True, exist_ok=True)
            (one.folder / RECIPE).write_text(recipes.dumps(one.recipe), encoding="utf-8")
        with (one.folder / LOG if one.ranks.first else Path(os.devnull)).open("a", encoding="utf-8") as log:
            if one.position.step == 0:
                self._validate(log)
            while one.position.step < settings.steps:
                self._step(log)
        self.export()
        at = one.position
        return Outcome(
            steps=at.step,
            tokens=at.tokens,
            loss=self.loss,
            validation=at.validation,
            seconds=self._seconds(),
            folder=one.folder,
        )

    def _step(self, log: Any) -> None:  # noqa: ANN401  an open file
        one, settings = self.run, self.settings
        lr = one.recipe.optimizer.lr * one.factor(one.position.step)
        try:
            made = self.stepped()
        except NotFinite as error:
            raise self._stopped(error) from error
        self.loss, step = made.loss, one.position.step
        last = step == settings.steps
        if step % settings.log_every == 0 or last or step == 1:
            said = Progress(step=step, steps=settings.steps, loss=made.loss, lr=lr, gradient_norm=made.gradient_norm)
            self._say(log, replace(said, fullest_expert=made.fullest, auxiliary=made.auxiliary, dropped=made.dropped))
        if last or (settings.validate_every and step % settings.validate_every == 0):
            self._validate(log)
        if last or (settings.save_every and step % settings.save_every == 0):
            self.save()

    def stepped(self) -> Stepped:
        """Makes one step."""
        return self.run.step()

    def validate(self) -> float | None:
        """Returns the mean loss of the validation text, None if there is none."""
        return self.run.validate()

    def _validate(self, log: Any) -> None:  # noqa: ANN401
        begun = time.perf_counter()
        found = self.validate()
        self._paused += time.perf_counter() - begun
        if found is not None:
            self._say(log, Progress(step=self.run.position.step, steps=self.settings.steps, validation=found))

    def save(self) -> None:
        """Writes a checkpoint, then removes those beyond the number that is kept."""
        one = self.run
        one.position = replace(one.position, seconds=self._seconds())
        states = one.folder / STATES
        self.write_state(states)
        if one.ranks.first:
            remove_old(states, self.settings.keep)

    def write_state(self, states: Path) -> None:
        """Writes the checkpoint of this step."""
        one = self.run
        save_state(states, one.model, one.optimizer, one.position, recipes.to_dict(one.recipe))

    def export(self) -> None:
        """Writes the trained model."""
        export(self.run)

    def _say(self, log: Any, progress: Progress) -> None:  # noqa: ANN401
        """Reports, and writes a line of the log."""
        at, now = self.run.position, time.perf_counter() - self._begun - self._paused
        done = at.step - self._before.step
        rate = (at.tokens - self._before.tokens) / now if now > 0 else 0.0
        left = (self.settings.steps - at.step) * now / done if done else 0.0
        progress = replace(progress, tokens=at.tokens, tokens_per_second=rate, seconds_left=left)
        said = {key: value for key, value in vars(progress).items() if value is not None and key != "steps"}
        log.write(json.dumps(said) + "\n")
        log.flush()
        self.report(progress)

    def _seconds(self) -> float:
        return self._before.seconds + time.perf_counter() - self._begun

    def _stopped(self, error: NotFinite) -> InputError:
        kept = checkpoints(self.run.folder / STATES)
        last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        return InputError(
            f"training stopped at step {self.run.position.step + 1}: {error.tensor} is not finite",
            field=str(self.run.folder),
            fix=f"lower optimizer.lr or raise schedule.warmup; {last}",
        )


def export(one: Run) -> Path:
    """Writes the model beside its tokenizer, in place of what was exported before; returns the folder."""
    folder = one.folder / EXPORTED
    with _replacing(folder) as fresh:
        beside = fresh.with_name(fresh.name + ".tokenizer")
        try:
            beside.mkdir()
            (beside / TOKENIZER).write_text(json.dumps(one.vocabulary.document, ensure_ascii=False), encoding="utf-8")
            save(
                one.model,
                fresh,
                family=one.reading.family or None,
                carried=one.reading.carried,
                tokenizer_from=Source(kind="folder", name="tokenizer", reading=one.reading, path=beside),
            )
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields the name of a folder to write, which takes the place of `folder` at the end."""
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    try:
        yield fresh
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removed")
            folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def require_new(recipe: Recipe) -> None:
    """Raises InputError if the folder of the run holds anything."""
    folder = Path(recipe.run.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("already exists", field="run.out", value=str(folder), fix="--resume it, or choose another")


def last_checkpoint(recipe: Recipe) -> Path | None:
    """Returns the last checkpoint of the run's folder, None if it stopped before the first."""
    found = checkpoints(Path(recipe.run.out) / STATES)
    if not found:
        if not Path(recipe.run.out).is_dir():
            raise InputError("nothing to resume", field="run.out", value=recipe.run.out)
        return None
    then, now = read_recipe(found[-1]), recipes.to_dict(recipe)
    for section, values in now.items():
        for key, value in values.items():
            name, old = f"{section}.{key}", then.get(section, {}).get(key)
            if value != old and name not in FREE and section not in FREE_SECTIONS:
                raise InputError(f"the run has {old!r}", field=name, value=value, fix="a changed run is another run")
    return found[-1]


def cut_log(path: Path, step: int) -> None:
    """Removes the lines of steps after this one, which are made again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if _step_of(line) <= step]
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(fresh, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # cut off when the process died
        return math.inf
