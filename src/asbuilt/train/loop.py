"""A run: the loop of steps with its log, validations and checkpoints, and the exported model at its end.

OUT/recipe.toml            every setting of the run
OUT/log.jsonl              a line for each logged step and each validation
OUT/checkpoints/step-N/    the whole state after N steps (train/state.py)
OUT/tokens/                the text as shards, unless it is held in memory (train/corpus.py)
OUT/adapter/               in its place the adapters in PEFT's layout, if they alone are trained
OUT/model/                 the trained model, for transformers where a published family can express it
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from asbuilt.checkpoint.save import GENERATION_KEYS
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import Reading, read_config
from asbuilt.nn.build import build, initialise
from asbuilt.nn.model import Model
from asbuilt.spec import DualEncoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.documents import require_separable
from asbuilt.spec.part import Gives
from asbuilt.train import recipe as recipes
from asbuilt.train.batch import IGNORED, Data, ImageTexts
from asbuilt.train.compiled import compile_blocks
from asbuilt.train.contrastive import Retrieval, retrieval, start_temperature
from asbuilt.train.corpus import TOKENS, read_corpus
from asbuilt.train.data import PairData
from asbuilt.train.divisible import require_context, require_spread, require_stages, tensor_share
from asbuilt.train.experts import Routing
from asbuilt.train.export import ADAPTER, EXPORTED, export
from asbuilt.train.image_texts import contrastive_data
from asbuilt.train.norms import Norms, Watched
from asbuilt.train.offload import HOST, require_apart
from asbuilt.train.optimizer import Optimizers, optimizers
from asbuilt.train.precision import AUTOCAST, faster
from asbuilt.train.ranks import ALONE, Ranks
from asbuilt.train.rate import matrix_rate, training_flops
from asbuilt.train.recipe import Recipe
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import Objective, Precision
from asbuilt.train.state import Position, checkpoints, load_state, read_recipe, remove_old, save_state
from asbuilt.train.step import NotFinite, Stepped, evaluate, train_step
from asbuilt.train.text import Vocabulary
from asbuilt.train.tune import chat_data, referred, tuned_model
from asbuilt.train.tune_settings import require_tunable
from asbuilt.train.width import scales

RECIPE, LOG, STATES = "recipe.toml", "log.jsonl", "checkpoints"
# Sections and keys that a resumed run may change: what is written when, not what is computed.
FREE = ("run.out", "run.log_every", "run.validate_every", "run.save_every", "run.keep", "data.text")
FREE += ("run.norms_every", "run.sample_every", "run.prompt", "run.sample_tokens", "run.sample_temperature")
FREE += ("run.plot", "run.tensorboard", "run.wandb")
FREE += ("data.chat", "data.preferences")
FREE_SECTIONS = ("parallel",)  # which processes compute it
TRAINED: tuple[Gives, ...] = ("logits", "similarities")
DECODER, ENCODER, BOTH = "a decoder", "an encoder", "an encoder-decoder"
DUAL = "an encoder of texts and one of images, compared without a bias,"
WANTED = {
    "next": DECODER,
    "prefix": DECODER,
    "masked": ENCODER,
    "spans": BOTH,
    "prefix-encoder": BOTH,
    "pairs": BOTH,
    "contrastive": DUAL,
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run reports: of a step or, with a `validation` or a `sample`, of the model after it.

    Losses are nats per token; `bits_per_byte` is the validation loss over the bytes of the text, where the model writes
    one; `mfu` is the share of the rate of a large product (train/rate.py). With contrastive pairs `texts_found` is the
    share of images whose nearest text of the `candidates` is their own, `images_found` that of texts.
    """

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
    mfu: float | None = None
    bits_per_byte: float | None = None
    sample: str | None = None
    gradients: dict[str, float] | None = None
    updates: dict[str, float] | None = None
    note: str | None = None
    precision: str | None = None
    texts_found: float | None = None
    images_found: float | None = None
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the last training and validation loss in nats per token, and where the model is."""

    steps: int
    tokens: int
    loss: float | None
    validation: float | None
    seconds: float
    folder: Path

    @property
    def exported(self) -> Path:
        """The folder of the trained model, or of the adapters."""
        adapter = self.folder / ADAPTER
        return adapter if adapter.is_dir() else self.folder / EXPORTED


Report = Callable[[Progress], None]
Sample = Callable[["Run"], str]


@dataclass(kw_only=True)
class Run:
    """Everything that a run works with; `position` moves."""

    recipe: Recipe
    model: Model
    data: Data
    optimizer: Optimizers
    reading: Reading
    vocabulary: Vocabulary
    note: str = ""
    """What was cut of the data, in words."""
    precision: str = ""
    """Which precision was chosen and why, in words, where the recipe leaves it open."""
    position: Position = field(default_factory=Position)
    flops: int = 0
    """FLOPs of the steps since the process began."""
    norms: Norms | None = None
    """Of the last step, where they were asked for."""
    found: Retrieval | None = None
    """Of the last validation of contrastive pairs."""
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
        read = [self.data.batch(at.step * given.accumulate + i, *ranks.rows) for i in range(given.accumulate)]
        batches = [ranks.cut(batch).to(self.model.device) for batch in read]
        every = self.recipe.run.norms_every
        watched = Watched(self.model) if every and (at.step + 1) % every == 0 else None
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
        spec = self.model.spec if self.recipe.tune.adapters else self.reading.spec
        computing = ranks.together * ranks.count // ranks.rows[1]  # the processes of one share
        self.flops += sum(training_flops(spec, batch) for batch in read) // computing
        self.norms = None if watched is None else watched.norms()
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
        pairs = [batch for batch in batches if isinstance(batch, ImageTexts)]
        self.found = retrieval(self.model, pairs) if pairs else None
        return found

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of the validation text for each of its targets; None where the model writes no text."""
        data = self.recipe.data
        unwritten = data.preferences or data.objective in ("masked", "spans", "contrastive")
        if unwritten or self.vocabulary.tokenizer is None:
            return None
        lengths_V, nbytes, counted = self.vocabulary.byte_lengths(), 0, 0
        for batch in self.data.validation():
            nbytes += int(lengths_V[batch.targets[batch.targets != IGNORED]].sum())
            counted += batch.counted
        return nbytes / counted if counted else None


def prepare(recipe: Recipe, divide: Callable[[Model], Model] = lambda model: model, device: torch.device = HOST) -> Run:
    """Returns a run at its beginning: data read, model built, initialised, and divided over devices by `divide`.

    `device` is where that leaves the model.
    """
    if recipe.step.offload:
        require_apart(device)
    data, vocabulary, note = read_data(recipe, Path(recipe.run.out))
    reading = described(recipe, vocabulary.n_vocab, vocabulary.end_id)
    # refuse before anything is built
    tensor_share(reading.spec, recipe.parallel.tensor, recipe.parallel.vocabulary)
    require_spread(reading.spec, recipe.parallel.expert)
    require_stages(reading.spec, recipe)
    require_context(reading.spec, recipe)
    if recipe.model.weights:
        model = tuned_model(recipe.model.source, recipe.tune, recipe.run.seed)
    else:
        model = build(reading.spec, seed=None)
        scaled = scales(reading.spec, recipe.model.base_width)
        initialise(model, recipe.run.seed, recipe.model.std, {path: one.std for path, one in scaled.items()})
        if recipe.data.objective == "contrastive":
            start_temperature(model)
    Routing(model, recipe.experts)  # refuses losses of experts that are not there
    if recipe.data.preferences:
        data = with_references(recipe, data, model)
    model = divide(model)
    recompute_blocks(model, recipe.step.checkpointing)
    said = ""
    if recipe.step.precision == "auto":
        precision, why = faster(model, data.batch(0).to(model.device), recipe)
        recipe, said = with_precision(recipe, precision), f"{precision}: {why}"
    if recipe.step.compile:
        compile_blocks(model)
    return Run(
        recipe=recipe,
        model=model,
        data=data,
        optimizer=optimizers(model, recipe.optimizer, recipe.model.base_width, offload=recipe.step.offload),
        reading=reading,
        vocabulary=vocabulary,
        note=note,
        precision=said,
    )


def with_precision(recipe: Recipe, precision: Precision) -> Recipe:
    """Returns the recipe with the precision that was left open."""
    return replace(recipe, step=replace(recipe.step, precision=precision))


def read_data(recipe: Recipe, out: Path) -> tuple[Data, Vocabulary, str]:
    """Returns the data that the recipe names, their tokenizer, and in words what was cut of them."""
    require_tunable(recipe)
    if recipe.data.chat or recipe.data.preferences:
        return chat_data(recipe)
    if recipe.data.objective == "contrastive":
        return *contrastive_data(recipe, described), ""
    return *read_corpus(recipe.data, recipe.run.seed, out), ""


def with_references(recipe: Recipe, data: Data, model: Model) -> Data:
    """Returns the data of preferences with what the model at the start says of each answer."""
    assert isinstance(data, PairData)
    given = recipe.step
    batches, rows = recipe.run.steps * given.accumulate, given.loss_rows or None
    return referred(data, model, batches, rows=rows, autocast=AUTOCAST[given.precision])


def described(recipe: Recipe, n_vocab: int, end_id: int | None = None) -> Reading:
    """Returns the reading of the recipe's model; raises InputError if it does not suit the data.

    A config is completed with the tokenizer's size and, where the text's vector is read at its end, the end token.
    """
    given = recipe.model
    if given.source:
        reading = open_model(given.source, weights=given.weights).reading
    else:
        reading = read_config(completed(given.config, recipe.data.objective, n_vocab, end_id), "model.config")
        # the defaults of published configs are tokens of other vocabularies
        reading = replace(reading, carried=dict.fromkeys(GENERATION_KEYS) | reading.carried)
    spec, context = reading.spec, recipe.data.context
    if recipe.data.document_mask:
        require_separable(spec)
    wanted = WANTED[recipe.data.objective]
    if spec.gives not in TRAINED or kind_of(spec) != wanted:
        raise InputError(
            f"the objective {recipe.data.objective} does not suit it",
            field="model",
            value=spec.name,
            allowed=f"{wanted} that gives {'similarities' if wanted == DUAL else 'logits'}",
        )
    if spec.n_vocab < n_vocab:
        raise InputError(
            f"the tokenizer has {n_vocab:,} tokens", field="model: n_vocab", value=spec.n_vocab, allowed="no fewer"
        )
    if context > spec.max_positions:
        raise InputError(field="data.context", value=context, allowed=f"at most {spec.max_positions}, the model's")
    return reading


def completed(config: dict[str, Any], objective: Objective, n_vocab: int, end_id: int | None) -> dict[str, Any]:
    """Returns the keys of a config with those that the tokenizer says, if they were left out."""
    if objective != "contrastive":
        return {"vocab_size": n_vocab} | config
    text = config.get("text_config", {})
    said = {"vocab_size": n_vocab, "eos_token_id": end_id}
    return config | {"text_config": said | text if isinstance(text, dict) else text}


def kind_of(spec: ModelSpec) -> str:
    """Returns the kind of model that an objective may ask for; empty for one that also reads images or sounds."""
    more = {*spec.reads} - {"tokens", "types"}
    if more == {"source"}:
        return BOTH
    if isinstance(spec, DualEncoder) and not spec.vision.bias:  # with one the loss is that of SigLIP
        return DUAL
    if more:
        return ""
    return DECODER if spec.decodes else ENCODER


def require_startable(recipe: Recipe, *, resume: bool) -> None:
    """Raises InputError for a folder that holds a run, or none to resume, and for samples of what writes no text."""
    if resume:
        last_checkpoint(recipe)
    else:
        require_new(recipe)
    if recipe.run.sample_every and WANTED[recipe.data.objective] != DECODER:
        problem = f"the objective {recipe.data.objective} trains no language model"
        raise InputError(problem, field="run.sample_every", value=recipe.run.sample_every, allowed="0")


def run(
    recipe: Recipe, *, resume: bool = False, report: Report = lambda _: None, sample: Sample | None = None
) -> Outcome:
    """Trains as the recipe says, from the beginning or from the last checkpoint in its folder.

    Resuming continues as if the run had never stopped: the same losses, the same weights, bit by bit. Raises
    InputError for a folder that holds a run already, for settings that differ from its own, and when a loss or a
    gradient is not finite. `sample` writes a text every `run.sample_every` steps.
    """
    require_startable(recipe, resume=resume)
    last = last_checkpoint(recipe) if resume else None
    made = prepare(settled(recipe, last))
    if last is not None:
        made.position = load_state(last, made.model, made.optimizer)
    if resume:
        cut_log(made.folder / LOG, -1 if last is None else made.position.step)
    return Loop(made, report, sample).finish()


def settled(recipe: Recipe, last: Path | None) -> Recipe:
    """Returns the recipe with the precision of the run that goes on from `last`, where it is left open."""
    if last is None or recipe.step.precision != "auto":
        return recipe
    return with_precision(recipe, read_recipe(last)["step"]["precision"])


class Loop:
    """The loop of a prepared run."""

    def __init__(self, made: Run, report: Report, sample: Sample | None = None) -> None:
        self.run, self.report, self.sample, self.settings = made, report, sample, made.recipe.run
        self.loss: float | None = None
        dtype = AUTOCAST[made.recipe.step.precision] or torch.float32
        self._peak = matrix_rate(made.model.device.type, dtype)
        self._begun, self._before = time.perf_counter(), made.position
        self._paused = 0.0

    def finish(self) -> Outcome:
        """Runs all steps that are left, and exports the model."""
        one = self.run
        try:
            self._all_steps()
            self.export()
        except OSError as error:
            raise self._unwritten(error.strerror or str(error)) from error
        at = one.position
        return Outcome(
            steps=at.step,
            tokens=at.tokens,
            loss=self.loss,
            validation=at.validation,
            seconds=self._seconds(),
            folder=one.folder,
        )

    def _all_steps(self) -> None:
        one, settings = self.run, self.settings
        if one.ranks.first:
            one.folder.mkdir(parents=True, exist_ok=True)
            _replace(one.folder / RECIPE, recipes.dumps(one.recipe))
        with (one.folder / LOG if one.ranks.first else Path(os.devnull)).open("a", encoding="utf-8") as log:
            if one.note:
                self._say(log, Progress(step=one.position.step, steps=settings.steps, note=one.note))
            if one.precision:
                self._say(log, Progress(step=one.position.step, steps=settings.steps, precision=one.precision))
            if one.position.step == 0:
                self._validate(log)
            while one.position.step < settings.steps:
                self._step(log)

    def _step(self, log: Any) -> None:  # noqa: ANN401  an open file
        one, settings = self.run, self.settings
        lr = one.recipe.optimizer.lr * one.factor(one.position.step)
        try:
            made = self.stepped()
        except NotFinite as error:
            raise self._stopped(error) from error
        self.loss, step = made.loss, one.position.step
        last = step == settings.steps
        if step % settings.log_every == 0 or last or step == 1 or one.norms is not None:
            said = Progress(step=step, steps=settings.steps, loss=made.loss, lr=lr, gradient_norm=made.gradient_norm)
            if one.norms is not None:
                said = replace(said, gradients=one.norms.gradients, updates=one.norms.updates)
            self._say(log, replace(said, fullest_expert=made.fullest, auxiliary=made.auxiliary, dropped=made.dropped))
        if self.sample is not None and settings.sample_every and step % settings.sample_every == 0:
            self._sampled(log, self.sample)
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
            per = self.run.bytes_per_token
            bits = found / math.log(2) / per if per else None
            at = Progress(step=self.run.position.step, steps=self.settings.steps, validation=found, bits_per_byte=bits)
            if (pairs := self.run.found) is not None:
                named = {"texts_found": pairs.texts, "images_found": pairs.images, "candidates": pairs.candidates}
                at = replace(at, **named)
            self._say(log, at)

    def _sampled(self, log: Any, sample: Sample) -> None:  # noqa: ANN401
        begun = time.perf_counter()
        self.run.model.eval()
        written = sample(self.run)
        self.run.model.train()
        self._paused += time.perf_counter() - begun
        self._say(log, Progress(step=self.run.position.step, steps=self.settings.steps, sample=written))

    def save(self) -> None:
        """Writes a checkpoint, then removes those beyond the number that is kept."""
        one = self.run
        one.position = replace(one.position, seconds=self._seconds())
        states = one.folder / STATES
        try:
            self.write_state(states)
        except InputError as error:
            raise self._unwritten(error.problem) from error
        if one.ranks.first:
            remove_old(states, self.settings.keep)

    def write_state(self, states: Path) -> None:
        """Writes the checkpoint of this step."""
        one = self.run
        save_state(states, one.model, one.optimizer, one.position, recipes.to_dict(one.recipe))

    def export(self) -> None:
        """Writes the trained model."""
        one = self.run
        export(one.recipe, one.model, one.reading, one.vocabulary)

    def _say(self, log: Any, progress: Progress) -> None:  # noqa: ANN401
        """Reports, and writes a line of the log."""
        at, now = self.run.position, time.perf_counter() - self._begun - self._paused
        done = at.step - self._before.step
        rate = (at.tokens - self._before.tokens) / now if now > 0 else 0.0
        left = (self.settings.steps - at.step) * now / done if done else 0.0
        mfu = self.run.flops / now / self._peak if done else None
        progress = replace(progress, tokens=at.tokens, tokens_per_second=rate, seconds_left=left, mfu=mfu)
        said = {key: value for key, value in vars(progress).items() if value is not None and key != "steps"}
        log.write(json.dumps(said) + "\n")
        log.flush()
        self.report(progress)

    def _seconds(self) -> float:
        return self._before.seconds + time.perf_counter() - self._begun

    def _stopped(self, error: NotFinite) -> InputError:
        return InputError(
            f"training stopped at step {self.run.position.step + 1}: {error.tensor} is not finite",
            field=str(self.run.folder),
            fix=f"lower optimizer.lr or raise schedule.warmup; {self._kept()}",
        )

    def _unwritten(self, why: str) -> InputError:
        return InputError(
            f"training stopped after step {self.run.position.step}: {why}",
            field=str(self.run.folder),
            fix=f"put that right and --resume; {self._kept()}",
        )

    def _kept(self) -> str:
        kept = checkpoints(self.run.folder / STATES)
        return f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"


def require_new(recipe: Recipe) -> None:
    """Raises InputError if the folder of the run holds anything."""
    folder = Path(recipe.run.out)
    if folder.exists() and (not folder.is_dir() or any(path.name != TOKENS for path in folder.iterdir())):
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
            chosen = name == "step.precision" and value == "auto"  # then it stays as it was chosen
            if value != old and not chosen and name not in FREE and section not in FREE_SECTIONS:
                raise InputError(f"the run has {old!r}", field=name, value=value, fix="a changed run is another run")
    return found[-1]


def cut_log(path: Path, step: int) -> None:
    """Removes the lines of steps after this one, which are made again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if _step_of(line) <= step]
    _replace(path, "".join(f"{line}\n" for line in kept))


def _replace(path: Path, text: str) -> None:
    """Writes a file that has, whatever happens, either the old text or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # cut off when the process died
        return math.inf
