"""What one device holds, keeps and multiplies of each piece of a model: folds over the declarations, made once a plan.

A piece is a block, or what comes before or after the blocks: what a pipeline stage holds whole. Equal blocks are folded
once. No formula of a part stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from asbuilt import cost
from asbuilt.cost.bill import TRAINING_FACTOR
from asbuilt.errors import InputError, near
from asbuilt.kernels.memory import memory
from asbuilt.plan.train.optimizers import Recipe, State
from asbuilt.spec import Block, Branch, Model, Part, Pass, walk, weights
from asbuilt.spec.part import Kind, Product, Weight, runs

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
# The loss is computed in float32.
LOGITS_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters B A beside frozen matrices of the blocks (arXiv 2106.09685), on `targets` or on all.

    `nf4` holds the frozen matrices in NF4 with double quantisation (QLoRA, arXiv 2305.14314).
    """

    rank: int
    targets: tuple[str, ...] | None
    nf4: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one forward pass by what its backward pass needs: both factors' gradients, or only one's.

    `frozen` are those of one gradient: of weights that are not trained, and of products with the data itself.
    """

    trained: int = 0
    frozen: int = 0
    scores: int = 0
    scores_causal: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            trained=self.trained + other.trained,
            frozen=self.frozen + other.frozen,
            scores=self.scores + other.scores,
            scores_causal=self.scores_causal + other.scores_causal,
        )

    def times(self, count: int) -> Work:
        """The same for `count` of them."""
        return Work(
            trained=count * self.trained,
            frozen=count * self.frozen,
            scores=count * self.scores,
            scores_causal=count * self.scores_causal,
        )

    def forward(self, *, causal: bool = True) -> int:
        """One forward pass."""
        return self.trained + self.frozen + (self.scores_causal if causal else self.scores)

    def training(self, *, causal: bool = True) -> int:
        """Forward, and backward at twice that, or once for products whose weight is frozen."""
        return TRAINING_FACTOR * self.forward(causal=causal) - self.frozen


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One device's share of a piece, ZeRO apart, and of one micro-batch.

    `kept` is by checkpointing: what stays until the backward pass; `shared` tensors are one for the whole stage.
    `reduced` numbers of the stream are summed over tensor-parallel ranks in a forward pass, and as many backward;
    outside the blocks once for both. `sent` ones go to experts and come back, `passed` bytes of keys and values go
    round the ring of a context.
    """

    dense: State = field(default_factory=State)
    experts: State = field(default_factory=State)
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINTING, 0))
    shared: dict[str, int] = field(default_factory=dict)
    room: int = 0
    work: Work = field(default_factory=Work)
    reduced: int = 0
    sent: int = 0
    passed: int = 0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The pieces of a model: `blocks` in order, as numbers of the `kinds` of piece they are of.

    `rows` of a micro-batch is 0 where only a number of parameters is known.
    """

    before: Piece
    kinds: tuple[Piece, ...]
    blocks: tuple[int, ...]
    after: Piece
    copied: State  # tables of the first stage that the last one multiplies too
    stream: int  # bytes of the residual stream of one micro-batch
    logits: int  # bytes of its logits in float32
    rows: int


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Which share of the work a device takes: the run it sees, its tensor- and expert-parallel degrees.

    `sequence` says that what tensor parallelism leaves whole is split by tokens (Korthikanti et al., arXiv 2205.05198).
    """

    run: Pass
    cp: int
    tp: int
    ep: int
    sequence: bool

    @property
    def local(self) -> Pass:
        """The rank's own tokens, the last ones: they see all keys."""
        tokens = self.run.tokens // self.cp
        return Pass(
            tokens=tokens,
            past=self.run.tokens - tokens,
            batch=self.run.batch,
            kernel=self.run.kernel,
            width=self.run.width,
        )


def shares(spec: Model, recipe: Recipe, lora: Lora | None, at: Slice, known: dict[tuple[object, ...], Piece]) -> Shares:
    """Returns the pieces of `spec` as one device of a layout sees them; `known` keeps pieces that layouts share.

    Raises InputError where a part cannot be divided as asked, and for adapters' targets that are none.
    """
    check_targets(spec, lora)
    fold = _Fold(recipe, lora, at, known)
    kinds: dict[tuple[str, Block], int] = {}
    blocks: list[int] = []
    pieces: list[Piece] = []
    before, after = Piece(), Piece()
    for path, child in children(spec):
        if not isinstance(child, Block):
            seen = at.run if "." in path else spec.child_run(path, at.run)
            if seen is None:
                made = fold.idle(child)
            else:  # a head over images sees one token of each
                own = fold if seen.tokens == at.run.tokens else replace(fold, at=replace(at, run=seen, cp=1))
                made = own.piece(path, child)
            above = path in ("norm", "head")
            before, after = (before, _joined(after, made)) if above else (_joined(before, made), after)
            continue
        key = (stack(path), child)
        if key not in kinds:
            kinds[key] = len(pieces)
            pieces.append(fold.piece(path, child))
        blocks.append(kinds[key])
    local = at.local
    stream = local.rows * spec.d_model * local.width
    return Shares(
        before=before,
        kinds=tuple(pieces),
        blocks=tuple(blocks),
        after=after,
        copied=_copied(spec, fold),
        stream=split(stream, at.tp if at.sequence else 1),
        logits=_logits(spec, replace(local, width=LOGITS_WIDTH), at),
        rows=local.rows,
    )


def children(spec: Model, prefix: str = "") -> Iterator[tuple[str, Part]]:
    """Yields (path, part) for the blocks of a model and what lies outside them, an encoder's before the model's own."""
    for name, child in spec.children():
        if isinstance(child, Model):
            yield from children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def stack(path: str) -> str:
    """The path before the stack's own: an encoder's, or nothing."""
    return "encoder." if path.startswith("encoder.") else ""


def in_block(path: str) -> bool:
    """Whether a path lies in a block, of the model or of its encoder."""
    return path.startswith(("blocks.", "encoder.blocks."))


def _joined(a: Piece, b: Piece) -> Piece:
    return Piece(
        dense=a.dense + b.dense,
        experts=a.experts + b.experts,
        kept={way: a.kept[way] + b.kept[way] for way in CHECKPOINTING},
        shared=a.shared | b.shared,
        work=a.work + b.work,
        reduced=a.reduced + b.reduced,
        sent=a.sent + b.sent,
        passed=a.passed + b.passed,
    )


def _width(part: Part) -> int:
    """d_model of a block; no stream is kept of what lies outside the blocks."""
    return part.branches[0].body.d_model if isinstance(part, Block) else 0


def _divided(whole: Part, part: Part, run: Pass) -> int:
    """Numbers of the stream that a table or head adds up, where its vocabulary is divided."""
    held = {path: getattr(owner, "n_vocab", 0) for path, owner in walk(part)}
    owners = [owner for path, owner in walk(whole) if getattr(owner, "n_vocab", 0) != held.get(path)]
    return sum(run.rows * getattr(owner, "d_model", 0) for owner in owners)


def split(size: int, ways: int) -> int:
    """Returns what the fullest of `ways` devices has of `size`."""
    return -(-size // ways)


@dataclass(frozen=True)
class _Fold:
    """Folds one piece after the other, all of one plan."""

    recipe: Recipe
    lora: Lora | None
    at: Slice
    known: dict[tuple[object, ...], Piece]

    def piece(self, path: str, whole: Part) -> Piece:
        """Returns one device's share of everything below `whole`."""
        key = (stack(path), whole, self.recipe, self.lora, replace(self.at, ep=1))
        if key not in self.known:
            self.known[key] = _Fold(self.recipe, self.lora, replace(self.at, ep=1), self.known).made(path, whole)
        alike = self.known[key]
        if self.at.ep == 1:
            return alike
        part = self._own(whole)  # expert parallelism divides the experts, and sends rows to them
        return replace(alike, experts=self._state_of(path, part, spread=True), sent=self._sent(path, part))

    def idle(self, whole: Part) -> Piece:
        """Returns one device's share of what is held, takes no part in the step, and is not trained."""
        held = (weight for _, owner in walk(self._own(whole)) for weight in owner.holds().values())
        return Piece(dense=sum((self.recipe.frozen(weight, nf4=False) for weight in held), State()))

    def _own(self, whole: Part) -> Part:
        return whole if self.at.tp == 1 else whole.shard(self.at.tp)

    def made(self, path: str, whole: Part) -> Piece:
        """Returns the piece, folded anew."""
        part = self._own(whole)
        inside, run = isinstance(whole, Block), self.at.local
        stream = run.rows * _width(whole)
        own, remade, shared = self._saved(path, whole, part)
        own += self._adapters_saved(path, part)
        kept = {"none": own, "selective": own - remade, "full": self._sequence(stream * run.width)}
        branches = sum(isinstance(below, Branch) for _, below in walk(part))
        sums = branches * stream if inside else _divided(whole, part, run)
        return Piece(
            dense=self._state_of(path, part, spread=False),
            experts=self._state_of(path, part, spread=True),
            kept=kept if inside else dict.fromkeys(CHECKPOINTING, own),
            shared=shared,
            room=memory(part).peak_bytes(run),
            work=self._work(path, whole, part),
            reduced=sums if self.at.tp > 1 else 0,
            sent=self._sent(path, part),
            passed=self._passed(part),
        )

    def _sequence(self, size: int) -> int:
        """A rank's share of what only tokens divide."""
        return split(size, self.at.tp if self.at.sequence else 1)

    def _state_of(self, path: str, part: Part, *, spread: bool) -> State:
        """The state of the experts that a device holds, or of all else."""
        total = State()
        for where, owner in walk(part, path):
            stacked = owner.spreads()
            for name, weight in owner.holds().items():
                if (name in stacked) == spread:
                    held = self._own_experts(weight) if spread else weight
                    total += self._state(f"{where}.{name}", held, owner.kind)
        return total

    def _own_experts(self, weight: Weight) -> Weight:
        """The experts that a device holds of a stack."""
        return replace(weight, shape=(split(weight.shape[0], self.at.ep), *weight.shape[1:]))

    def _state(self, path: str, weight: Weight, kind: Kind) -> State:
        """A trained weight, or a frozen one with its adapters."""
        if not weight.learned or weight.frozen:
            return self.recipe.frozen(weight, nf4=False)
        if self.lora is None:
            return self.recipe.trained(weight, kind)
        matrix = in_block(path) and weight.role == "matrix"
        state = self.recipe.frozen(weight, nf4=self.lora.nf4 and matrix)
        if self._adapted(path, weight, kind):
            state = sum((self.recipe.trained(a, kind) for a in adapters(weight, self.lora.rank)), state)
        return state

    def _saved(self, path: str, whole: Part, part: Part) -> tuple[int, int, dict[str, int]]:
        """Bytes that the piece keeps, those of them it can make again, and by name the tensors that all pieces share.

        What tensor parallelism leaves whole and has a row per token is divided by tokens.
        """
        run, dropped = self.at.local, cost.recomputed_tensors(part, path)
        found = cost.saved_tensors(part, run, path)
        before = cost.saved_tensors(whole, run, path) if self.at.tp > 1 else {}
        twice = cost.saved_tensors(part, replace(run, batch=2 * run.batch), path) if self.at.tp > 1 else {}
        own, remade, shared = 0, 0, {}
        for key, tensor in found.items():
            nbytes = tensor.nbytes(run.width)
            if tensor.shared:
                shared[f"{stack(path)}{key}"] = nbytes
                continue
            if key in before and before[key].size == tensor.size and twice[key].size == 2 * tensor.size:
                nbytes = self._sequence(nbytes)
            own += nbytes
            remade += nbytes if key in dropped else 0
        return own, remade, shared

    def _products(self, path: str, part: Part, run: Pass) -> Iterator[tuple[Product, bool]]:
        """Yields each product, and whether an adapter stands beside its weight."""
        for where, owner, seen in runs(part, run, path):
            held = owner.local_weights()
            for product in owner.multiplies(seen):
                weight = held.get(product.weight or "")
                adapted = weight is not None and self._adapted(f"{where}.{product.weight}", weight, owner.kind)
                yield product, adapted

    def _adapted(self, path: str, weight: Weight, kind: Kind) -> bool:
        return self.lora is not None and targeted(self.lora, path, weight, kind)

    def _work(self, path: str, whole: Part, part: Part) -> Work:
        """The rank's products of a whole sequence, which context parallelism divides evenly.

        What tensor parallelism leaves whole is computed for a share of the tokens.
        """
        done = dict.fromkeys(("trained", "frozen", "scores", "scores_causal"), 0)
        pairs = zip(self._products(path, part, self.at.run), self._products(path, whole, self.at.run), strict=True)
        for (product, adapted), (before, _) in pairs:
            ways = self.at.tp if self.at.sequence and product.flops == before.flops else 1
            if product.caching:
                continue
            if product.weight is None:
                done["scores"] += split(product.flops, ways)
                done["scores_causal"] += split(product.causal_flops, ways)
            else:
                once = self.lora is not None or product.one_gradient
                done["frozen" if once else "trained"] += split(product.flops, ways)
            if adapted and self.lora is not None:
                adapter = 2 * product.a * self.lora.rank * (product.b + product.c) * product.n
                done["trained"] += split(adapter, ways)
        return Work(**{name: split(flops, self.at.cp) for name, flops in done.items()})

    def _adapters_saved(self, path: str, part: Part) -> int:
        """What B reads: rank numbers a row for each adapted product; A reads what the frozen matrix does."""
        if self.lora is None:
            return 0
        run = self.at.local
        rows = sum(product.a * product.n for product, adapted in self._products(path, part, run) if adapted)
        return self._sequence(rows * self.lora.rank * run.width)

    def _sent(self, path: str, part: Part) -> int:
        """Rows that go to experts in one forward pass: those of the widest product with spread weights of each part."""
        if self.at.ep == 1:
            return 0
        rows: dict[str, int] = {}
        for where, owner, seen in runs(part, self.at.local, path):
            of_experts = [product.a for product in owner.multiplies(seen) if product.weight in owner.spreads()]
            rows[where] = max(of_experts, default=0)
        return self._sequence(sum(rows.values())) * _width(part)

    def _passed(self, part: Part) -> int:
        """Bytes of keys and values that go by on a context's ring in a forward pass: the others' part of each."""
        if self.at.cp == 1:
            return 0
        own, seen = self.at.local, self.at.run.tokens
        remembered = [r for _, below in walk(part) for r in below.remembers()]
        numbers = sum(r.size * min(r.tokens_kept(seen), seen - own.tokens) for r in remembered)
        return own.batch * numbers * own.width


def label(path: str) -> str:
    """The name that a target gives: `q` of `blocks.0.attention.body.q.weight`, `gate` of a stack of experts."""
    return path.removesuffix(".weight").rpartition(".")[2]


def targeted(lora: Lora, path: str, weight: Weight, kind: Kind) -> bool:
    """Whether this weight has an adapter: a matrix of a block, not of a router, and one of the targets."""
    inside = in_block(path) and weight.role == "matrix" and kind != "router"
    return inside and (lora.targets is None or label(path) in lora.targets)


def check_targets(spec: Model, lora: Lora | None) -> None:
    """Raises InputError for a target that no matrix of the blocks is named by."""
    if lora is None:
        return
    every = replace(lora, targets=None)
    known = {
        label(path): None
        for block in dict.fromkeys(child for _, child in children(spec) if isinstance(child, Block))
        for path, weight, owner in weights(block)
        if targeted(every, f"blocks.0.{path}", weight, owner.kind)
    }
    for target in lora.targets or ():
        if target not in known:
            raise InputError(
                "no matrix of a block has this name",
                field="targets",
                value=target,
                allowed=", ".join(known),
                fix=near(target, known),
            )


def adapters(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """A (rank, in) and B (out, rank), for each matrix of a stack."""
    *stack, out, inside = weight.shape
    return Weight(shape=(*stack, rank, inside), role="matrix"), Weight(shape=(*stack, out, rank), role="matrix")


def _logits(spec: Model, run: Pass, at: Slice) -> int:
    """Bytes of a rank's logits: of its columns, padded where the degree does not divide them, or of its tokens."""
    whole, classes = cost.logits_bytes(spec, run), getattr(spec.head, "n_vocab", 0)
    if spec.head is None or at.tp == 1 or not classes:
        return whole
    own = getattr(spec.head.shard(at.tp), "n_vocab", classes)
    return whole // classes * own if own < classes else split(whole, at.tp if at.sequence else 1)


def _copied(spec: Model, fold: _Fold) -> State:
    """Weights of other pieces that the head multiplies, by their absolute paths: a tied embedding."""
    products = () if spec.head is None else spec.head.multiplies(fold.at.local)
    wanted = {p.weight[1:] for p in products if p.weight is not None and p.weight.startswith("/")}
    local = spec.embedding if fold.at.tp == 1 else spec.embedding.shard(fold.at.tp)
    found = {f"embedding.{name}": weight for name, weight in local.holds().items()}
    return sum((fold._state(path, found[path], local.kind) for path in sorted(wanted)), State())
