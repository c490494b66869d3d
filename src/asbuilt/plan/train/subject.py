"""What is trained: a model, or only a number of parameters; its shares on one device, and its FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from asbuilt import cost
from asbuilt.errors import InputError, one_of
from asbuilt.plan.devices import known
from asbuilt.plan.placement import Placement, divisors
from asbuilt.plan.train import schedule
from asbuilt.plan.train.optimizers import BY_SHAPE, State
from asbuilt.plan.train.options import SIX, Options, require_number
from asbuilt.plan.train.shares import Adapters, Piece, Shares, Slice, shares, split
from asbuilt.plan.train.stages import Section, StageMemory, sections
from asbuilt.plan.train.work import Timed, Work
from asbuilt.spec import DualEncoder, LanguageModel, Model, Part, Pass, VisionLanguageModel, adapted
from asbuilt.spec.adapters import is_pattern
from asbuilt.spec.documents import require_separable
from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.part import Weight

LARGEST_TP = 256
Unit = Literal["tokens", "pairs"]
# What does not follow from a number of parameters alone.
UNSAID = (
    "activations, the loss, and working memory of a block's backward pass: they depend on widths, depth and vocabulary",
    "blocks gathered by ZeRO-3, gradients before ZeRO-2 and 3 scatter them",
    "attention scores",
    "traffic of tensor, context and pipeline parallelism",
)


class Subject:
    """What is trained: a model, or only a number of parameters. Caches the folds that layouts share."""

    def __init__(self, model: Model | None = None, parameters: float | None = None) -> None:
        if model is None and parameters is not None:
            require_number("parameters", parameters, 0.0, 1e15)
            if parameters < 1:
                raise InputError(field="parameters", value=parameters, allowed="a number of at least 1")
        elif not isinstance(model, Model):
            raise InputError(
                "only a model of one stack of blocks can be planned", field="model", value=type(model).__name__
            )
        elif (refused := _not_planned(model)) is not None:
            fix = "`asbuilt describe` shows the costs of a pass"
            raise InputError(refused, field="MODEL", value=model.name, fix=fix)
        self.model = model
        self.paired = isinstance(model, DualEncoder)
        self.total = _folded(model, cost.total_parameters) if model is not None else int(parameters or 0)
        self.active = self.total
        if model is not None:
            one = Pass(tokens=1, images=int(self.paired))
            self.active = _of_run(model, one, lambda part, _: cost.active_parameters(part))
        self._kept: dict[tuple[object, ...], Shares] = {}
        self._pieces: dict[tuple[object, ...], Piece] = {}
        self._adapted: dict[tuple[object, ...], Model] = {}
        self._sections: dict[tuple[int, int], list[Section]] = {}

    @cached_property
    def experts(self) -> int:
        """The greatest common divisor of the numbers of experts; 1 without mixtures of experts."""
        nodes = known(self.model).tree(Placement()).below() if self.model is not None else ()
        counts = [n for node in nodes for n in node.own.spreads().values()]
        return math.gcd(*counts) if counts else 1

    def stages(self, options: Options) -> list[StageMemory]:
        """Returns the distinct stages; raises InputError for a degree that the model or the GPUs do not allow."""
        layout, shares = options.layout, self.shares(options)
        job = options.job(chunks(options, len(shares.blocks)))
        job = replace(job, loss="contrastive") if self.paired else job
        key = (id(shares), layout.pp)
        if key not in self._sections:
            self._sections[key] = sections(shares, layout.pp)
        return [StageMemory(section=section, layout=layout, job=job) for section in self._sections[key]]

    def shares(self, options: Options) -> Shares:
        """Returns one device's share of each piece; raises InputError for a degree that the model does not allow."""
        o = options
        pp = o.pp if self.model is None else None
        self._check_stages(o)
        alike = (o.sequence_parallel, o.divide_vocabulary, o.pad_vocabulary, o.documents)
        key = (o.batch, o.seq, o.tp, o.cp, o.gather_context, o.ep, pp, o.recipe, o.adapters, *alike)
        if key not in self._kept:
            self._check(o)
            run = Pass(tokens=o.seq, batch=o.batch, width=o.width, images=int(self.paired), documents=o.documents)
            given: dict[str, Any] = {"sequence": alike[0], "vocabulary": alike[1], "gathers": o.gather_context}
            at = Slice(run=run, tp=o.tp, cp=o.cp, ep=o.ep, **given)
            if self.model is None:
                self._kept[key] = self._bare(o, at)
            else:
                model = self._with(o.adapters, o.pad_vocabulary * o.tp if o.pad_vocabulary > 1 else 1)
                self._kept[key] = shares(model, o.recipe, o.adapters, at, self._pieces)
        return self._kept[key]

    def _with(self, adapters: Adapters | None, rows: int = 1) -> Model:
        """Returns the model with its adapters and padded rows; raises InputError for targets that are none."""
        assert self.model is not None
        if rows > 1:
            if ("padded", rows, adapters) not in self._adapted:
                self._adapted["padded", rows, adapters] = _padded(self._with(adapters), rows)
            return self._adapted["padded", rows, adapters]
        if adapters is None:
            return self.model
        key = (adapters.rank, adapters.targets)
        if key not in self._adapted:
            small, order = known(self.model).census.small, known(self.model).order  # equal blocks once
            if any(map(is_pattern, adapters.targets or ())):  # which may name blocks
                small, order = self.model, tuple(range(len(self.model.blocks)))
            assert isinstance(small, Model)
            # what makes something of images and sounds is not trained
            text = small.text if isinstance(small, VisionLanguageModel) else small
            found = adapted(text, adapters.rank, float(adapters.rank), adapters.targets)
            found = replace(found, blocks=tuple(found.blocks[kind] for kind in order))
            if isinstance(self.model, VisionLanguageModel) and isinstance(found, LanguageModel):
                found = VisionLanguageModel.of(found, self.model.vision, self.model.hearing)
            self._adapted[key] = found
        return self._adapted[key]

    def _check_stages(self, o: Options) -> None:
        encoder = self.model is not None and "source" in self.model.reads
        for name in ("pp", "cp") if encoder or self.paired else ():
            if getattr(o, name) > 1:
                which = "two towers" if self.paired else "an encoder"
                problem = f"not supported for a model with {which}"
                raise InputError(problem, field=name, value=getattr(o, name), allowed="1")
        if self.paired and o.loss != Options.loss:
            problem = "it is of a vocabulary, and pairs have a loss of their own"
            raise InputError(problem, field="loss", value=o.loss, fix="leave it out")
        if self.paired and o.chunked_loss > 1:
            problem = "each pair is contrasted with all others of its batch"
            raise InputError(problem, field="chunked_loss", value=o.chunked_loss, allowed="1")
        if self.paired and o.adapters is not None:
            problem = "adapters of two towers are not planned"
            raise InputError(problem, field="lora", value=o.adapters.rank, fix="leave it out")
        if self.model is not None and self.model.holders and o.pp > 1:
            raise InputError(
                "not supported for a model whose blocks share weights: each stage needs them and their gradients",
                field="pp",
                value=o.pp,
                allowed="1",
            )
        if self.model is not None and o.pp > self.model.n_layers:
            raise InputError(
                "more stages than blocks", field="pp", value=o.pp, allowed=f"1 to n_layers = {self.model.n_layers}"
            )

    def _check(self, o: Options) -> None:
        if self.model is not None and "tokens" not in self.model.reads and o.seq != self.model.max_positions:
            raise InputError(
                "the number of tokens of an image is fixed",
                field="seq",
                value=o.seq,
                allowed=str(self.model.max_positions),
            )
        if o.documents:
            self._check_documents(o)
        if o.seq % o.cp:
            allowed = one_of(map(str, divisors(o.seq)))
            raise InputError(f"does not divide seq = {o.seq} tokens", field="cp", value=o.cp, allowed=allowed)
        if self.experts % o.ep:
            allowed = one_of(map(str, divisors(self.experts)))
            said = f"does not divide {self.experts} experts" if self.experts > 1 else "this model has no experts"
            raise InputError(said, field="ep", value=o.ep, allowed=allowed)
        if self.model is None:
            self._check_bare(o)
        elif not self.divides(o.tp):
            allowed = [tp for tp in range(1, LARGEST_TP + 1) if self.divides(tp)]
            raise InputError("does not divide every part", field="tp", value=o.tp, allowed=one_of(map(str, allowed)))

    def _check_documents(self, o: Options) -> None:
        alone = self.model is not None and self.model.gives == "logits" and "source" not in self.model.reads
        if self.model is None or not alone or o.cp > 1:
            problem = (
                "documents are kept apart in models that read tokens and predict them, without context parallelism"
            )
            raise InputError(problem, field="documents", value=True, allowed="false")
        require_separable(self.model)

    def divides(self, tp: int) -> bool:
        """Returns whether every part can be divided over `tp` devices."""
        assert self.model is not None
        return known(self.model).divides(tp)

    def _check_bare(self, o: Options) -> None:
        if o.optimizer in BY_SHAPE:
            raise InputError(
                "its state depends on the weights' shapes, which a number of parameters does not have",
                field="optimizer",
                value=o.optimizer,
                allowed="adamw, adamw-8bit or sgd-momentum",
                fix="name a MODEL",
            )
        if o.adapters is not None:
            raise InputError(
                "adapters need matrices, which a number of parameters does not have",
                field="lora",
                value=o.adapters.rank,
                fix="name a MODEL",
            )

    def _bare(self, o: Options, at: Slice) -> Shares:
        """Returns the shares of a number of parameters, evenly divided: state, 2N FLOPs per token, no activations."""
        own = Weight(shape=(split(self.total, o.tp * o.pp),), role="matrix")
        work = Work(trained=split(2 * own.size * at.run.rows, o.cp))
        products = Timed(flops=work.trained, rows=0, weights=0, gradients=2)
        piece = Piece(dense=o.recipe.trained(own, "other"), work=work, products=(products,))
        return Shares(
            before=Piece(),
            kinds=(piece,),
            blocks=(0,) * o.pp,
            after=Piece(),
            copied=State(),
            stream=0,
            logits=0,
            read_once=False,
            rows=0,
        )

    @property
    def unit(self) -> Unit:
        """What a run's data are counted in."""
        return "pairs" if self.paired else "tokens"

    def each(self, options: Options) -> int:
        """Returns the units of a sequence: its tokens, or one pair."""
        return 1 if self.paired else options.seq

    def flops(self, options: Options) -> dict[str, float]:
        """Returns training FLOPs per token, or pair, by convention, of all devices together, without recomputation.

        A pair has the scores of its image with the texts of the batch, and its towers 6 FLOPs for each of their tokens.
        """
        found: dict[str, float] = {"6ND": SIX * self.active}
        if self.model is not None:
            alone = replace(options, batch=options.batch if self.paired else 1, tp=1, ep=1, cp=1)
            (whole,) = sections(self.shares(alone), 1)
            for name, causal in (("exact", False), ("exact_causal", True)):
                made = sum(count * piece.work.training(causal=causal) for piece, count in whole.counted)
                found[name] = made / (alone.batch * self.each(options))
        if isinstance(self.model, DualEncoder):
            seen = cost.active_parameters(self.model.vision)
            found["6ND"] = SIX * ((self.active - seen) * options.seq + seen * self.model.patches.n_tokens)
        return found


def chunks(options: Options, blocks: int) -> int:
    """Returns the number of model chunks per pipeline stage: as given, or as many as blocks and schedule allow.

    Raises InputError for more chunks than blocks per stage, and if the interleaved schedule has incomplete rounds.
    """
    most, way = split(blocks, options.pp), options.schedule
    whole = options.pp > 1 and options.accumulate % options.pp == 0
    if way is not None:
        schedule.require(way, options.pp, options.accumulate)
    if options.interleave is None:
        return most if whole and way in (None, "interleaved") else 2 if way == "zb-v" and most > 1 else 1
    if way not in (None, "interleaved") and options.interleave > 1:
        raise InputError(
            f"{way} has chunks of its own", field="interleave", value=options.interleave, allowed="1, or left out"
        )
    if options.interleave > most:
        raise InputError(
            "more chunks than a stage has blocks", field="interleave", value=options.interleave, allowed=f"1 to {most}"
        )
    if options.interleave > 1 and not whole:
        raise InputError(
            "an interleaved schedule needs micro-batches in multiples of the stages",
            field="interleave",
            value=options.interleave,
            allowed="1",
            fix=f"set --accumulate to a multiple of pp = {options.pp}",
        )
    return options.interleave


def _padded(model: Model, rows: int) -> Model:
    """Returns the model with a vocabulary that is a multiple of `rows`, as Megatron-LM pads it."""
    n_vocab = split(model.n_vocab, rows) * rows
    if not isinstance(model.embedding, TokenEmbedding) or not isinstance(model.head, Head | TiedHead):
        raise InputError(
            "only a vocabulary with one table and a head of its own can be padded",
            field="pad_vocabulary",
            value=rows,
            allowed="1",
        )
    embedding, head = replace(model.embedding, n_vocab=n_vocab), replace(model.head, n_vocab=n_vocab)
    fewer: dict[str, Any] = {"predictors": ()} if getattr(model, "predictors", ()) else {}  # which are not trained
    return replace(model, embedding=embedding, head=head, **fewer)


def _folded(model: Model, figure: Callable[[Part], int]) -> int:
    """Returns the sum of a figure over the model's children, equal ones computed once."""
    counted = Counter(child for _, child in model.children())
    return sum(count * figure(child) for child, count in counted.items())


def _not_planned(model: Model) -> str | None:
    """Returns why training a model is not planned; None if it is."""
    if isinstance(model, DualEncoder):
        return "the sigmoid loss of pairs is not planned" if model.vision.bias else None
    if model.gives == "similarities" or ("audio" in model.reads and "images" not in model.reads):
        return "training on pairs of sounds and texts is not planned"
    return None


def _of_run(model: Model, run: Pass, figure: Callable[[Part, Pass], int]) -> int:
    """Returns the sum of a figure over the model's children that run, equal ones with equal runs computed once."""
    seen = ((child, model.child_run(name, run)) for name, child in model.children())
    counted = Counter((child, own) for child, own in seen if own is not None)
    return sum(count * figure(child, own) for (child, own), count in counted.items())
