"""One device's weights, saved tensors and products of each piece of a model: folds over the declarations.

A piece is a block, or the parts before or after the blocks: a pipeline stage holds whole pieces. Parts declare what
tensor parallelism divides: a weight its `split`, a saved tensor its `divided`. No formula of a part is repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from asbuilt import cost
from asbuilt.cost.folded import Node
from asbuilt.kernels.memory import memory
from asbuilt.plan.devices import ABOVE, known
from asbuilt.plan.train.choices import CHECKPOINTING, Checkpointing
from asbuilt.plan.train.optimizers import Recipe, State
from asbuilt.plan.train.room import room
from asbuilt.plan.train.work import (
    ADAPTER,
    LOGITS_WIDTH,
    Adapters,
    Slice,
    Timed,
    Work,
    listed,
    scored,
    split,
    splits,
    timed,
    times_in,
)
from asbuilt.spec import (
    MLP,
    Block,
    Branch,
    Contrast,
    GatedMLP,
    Head,
    Map,
    Model,
    Part,
    Pass,
    PatchEmbedding,
    TiedHead,
)
from asbuilt.spec.part import Kind, Weight, walk

# The paths of stacks within a model whose blocks are trained: an encoder, and the tower of pairs.
TOWER = "vision.tower."
ENCODER = "encoder."
INNER = (ENCODER, TOWER)
# Pixels of a batch are in float32, the numbers of its tokens' documents in int64.
PIXEL_WIDTH, INDEX_WIDTH = 4, 8


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One device's share of a piece, ZeRO apart, and of one micro-batch.

    `kept` is by checkpointing: what stays until the backward pass; `shared` tensors are one for the whole stage, as are
    those that are `lent` to other blocks and stay only where blocks are repeated. `working`, by checkpointing, is a
    block's working memory: a bound, unless its parts declare it (room.py). `awaited` are gradients that add up over the
    blocks of a stack, `made_again` the bytes of what its first block lends, which it makes twice where it is repeated.
    `reduced` numbers of the stream are summed over tensor-parallel ranks in a forward pass, and as many backward,
    `again` with full checkpointing; outside the blocks once for both. `measured` are those of the loss of a divided
    vocabulary, `summed` bytes of gradients those of weights that each of these ranks has whole, within what they
    divide. `sent` ones go to experts and come back, each token's `once` if a node is sent it once; `passed` bytes of
    keys and values go round the ring of a context, or are gathered. `products` and `scored` numbers of scores are for
    the time of a pass. `apart` bytes, by checkpointing, are saved by what runs later, and gone before this piece's
    backward pass. `spared` FLOPs are those of a last product that is only added to the stream: PyTorch's repetition of
    a block ends before it.
    """

    dense: State = field(default_factory=State)
    experts: State = field(default_factory=State)
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINTING, 0))
    apart: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINTING, 0))
    shared: dict[str, int] = field(default_factory=dict)
    lent: dict[str, int] = field(default_factory=dict)
    working: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINTING, 0))
    bounded: bool = True
    awaited: int = 0
    made_again: int = 0
    work: Work = field(default_factory=Work)
    products: tuple[Timed, ...] = ()
    scored: int = 0
    reduced: int = 0
    again: int = 0
    measured: int = 0
    summed: int = 0
    sent: int = 0
    once: int = 0
    passed: int = 0
    spared: int = 0

    def room(self, way: Checkpointing) -> int:
        """Bytes that a block needs beside all that is saved: what it recomputes, and its working memory."""
        return self.kept["none"] - self.kept[way] + self.working[way] - self.apart[way]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The pieces of a model: `blocks` in order, as numbers of the `kinds` of piece they are of.

    The kinds `encoding` are an encoder's, whose backward pass is after that of the embedding's other use. `rows` of a
    micro-batch, those of its logits or similarities, are 0 where only a number of parameters is known.
    """

    before: Piece
    kinds: tuple[Piece, ...]
    blocks: tuple[int, ...]
    after: Piece
    copied: State  # tables of the first stage that the last one multiplies too
    stream: int  # bytes of the residual stream of one micro-batch
    logits: int  # bytes of its logits in float32
    read_once: bool  # whether the loss can be in their place
    rows: int
    entering: int = 0  # bytes when all that is saved is gone: a new gradient of the table, the stream's, and pixels
    encoding: tuple[int, ...] = ()
    norm: int = 0  # bytes that the norm before the head needs backward, beside its gradient


def shares(
    spec: Model, recipe: Recipe, adapters: Adapters | None, at: Slice, kept: dict[tuple[object, ...], Piece]
) -> Shares:
    """Returns the pieces of `spec` as one device of a placement sees them; `kept` keeps pieces that placements share.

    With `adapters` the spec is one that has them. Raises InputError where a part cannot be divided as asked.
    """
    view, fold = known(spec), _Fold(recipe, adapters, at, kept, _read_in_blocks(spec, at.local))
    root = view.tree(at.placement)
    kinds: dict[str, int] = {}
    pieces: list[Piece] = []
    encoding: list[int] = []
    before, after = Piece(), Piece()
    later = dict.fromkeys(CHECKPOINTING, 0)  # kept by a tower, which runs after the text
    for node, seen in _pieces(root, at.run):
        made = fold.idle(node) if seen is None else fold.seeing(seen).piece(node)
        if isinstance(node.whole, Block):
            kinds[node.path] = len(pieces)
            encoding += [len(pieces)] if stack(node.path) == ENCODER else []
            pieces.append(made if stack(node.path) else replace(made, apart=later))
        if stack(node.path) == TOWER:
            later = {way: later[way] + node.count * made.kept[way] for way in CHECKPOINTING}
        if isinstance(node.whole, Block):
            continue
        ends = node.path in ABOVE or (isinstance(node.whole, Contrast) and seen is not None)
        before, after = (before, _joined(after, made)) if ends else (_joined(before, made), after)
    local = at.local
    pixels = _pixels(spec.patches, local) if spec.patches is not None and local.images else 0
    numbers = INDEX_WIDTH * local.rows if local.documents else 0
    given = {name: size for name, size in (("pixels", pixels), ("documents", numbers)) if size}
    before = replace(before, shared=before.shared | given) if given else before
    stream = local.rows * spec.stream_width * local.width
    return Shares(
        before=before,
        kinds=tuple(pieces),
        blocks=tuple(_order(root, view.order, kinds)),
        after=after,
        copied=_copied(root, fold),
        stream=split(stream, at.by_tokens),
        logits=_logits(spec, root, replace(local, width=LOGITS_WIDTH), at),
        read_once=_read_once(root),
        rows=local.batch if spec.gives == "similarities" else local.rows,
        entering=pixels + split(stream, at.by_tokens) + _table(root, fold),
        encoding=tuple(encoding),
        norm=split(_norm(root, local), at.by_tokens),
    )


def _norm(root: Node, run: Pass) -> int:
    """Bytes that the norm before the head needs backward, as far as its kind is known."""
    found = (memory(child.own).room(run) for child in root.children if child.name == "norm")
    return max((one.backward for one in found if one is not None), default=0)


def _table(root: Node, fold: _Fold) -> int:
    """Bytes of a new gradient of the largest weight of the embedding."""
    held = (child for child in root.children if child.name == "embedding")
    found = (fold.state(f"{n.path}.{name}", w, n.own.kind) for n in held for name, w in n.own.holds().items())
    return max((state.gradients for state in found), default=0)


def _pixels(patches: PatchEmbedding, run: Pass) -> int:
    """Bytes of the images of a micro-batch, which are there in float32 until its end."""
    return run.batch * run.images * patches.channels * patches.image_size**2 * PIXEL_WIDTH


def _pieces(root: Node, run: Pass) -> Iterator[tuple[Node, Pass | None]]:
    """Yields (node, the pass that it sees, if it runs) for blocks and what lies outside them.

    Those of an encoder, and of a tower whose vectors are compared, are pieces like a model's own.
    """
    model = root.whole
    assert isinstance(model, Model)
    for child in root.children:
        seen = model.child_run(child.name, run)
        if isinstance(child.whole, Model):
            yield from ((node, run) for node in child.children)
        elif isinstance(child.whole, Contrast) and seen is not None:
            yield replace(child, children=()), seen
            (tower,) = child.children
            encoder, own = child.whole.tower, child.whole.child_run(tower.name, seen)
            yield from ((node, encoder.child_run(node.name, own)) for node in tower.children)
        elif isinstance(child.whole, Block) and seen is not None:
            yield child, run
        else:
            yield child, seen


def _inner(root: Node) -> Iterator[Node]:
    """Yields the stacks within a model: an encoder, and a tower whose vectors are compared."""
    for child in root.children:
        if isinstance(child.whole, Model):
            yield child
        elif isinstance(child.whole, Contrast):
            yield from child.children


def _order(root: Node, order: tuple[int, ...], kinds: dict[str, int]) -> Iterator[int]:
    """The index of every block's piece, an inner stack's before the model's own."""
    for stack in _inner(root):
        for block in stack.children:
            if isinstance(block.whole, Block):
                yield from [kinds[block.path]] * block.count
    yield from (kinds[f"blocks.{kind}"] for kind in order if f"blocks.{kind}" in kinds)


def _read_in_blocks(spec: Model, run: Pass) -> dict[str, bool]:
    """Returns the paths of what reads another piece's input, and whether that piece saves it; a repeated block does.

    A block that is not repeated saves no input that it scales first.
    """
    found: dict[str, bool] = {}
    for at, part in _models(spec):
        for second, first in memory(part).same_input():
            blocks = ((name, child) for name, child in part.children() if first.startswith(f"{name}."))
            saved = all(f"{first}:input" in cost.saved_tensors(block, run, name) for name, block in blocks)
            found[f"{at}.{second}" if at else second] = saved
    return found


def _models(part: Part, path: str = "") -> Iterator[tuple[str, Model]]:
    """Yields (path, part) for whole models, which no block holds: a fold of every block would take longer."""
    if isinstance(part, Model):
        yield path, part
    for name, child in part.children():
        if not isinstance(child, Block):
            yield from _models(child, f"{path}.{name}" if path else name)


def stack(path: str) -> str:
    """The path prefix of the stack: the encoder's, the tower's, or empty."""
    return next((inner for inner in INNER if path.startswith(inner)), "")


def in_block(path: str) -> bool:
    """Whether a path lies in a block, of the model or of a stack within it."""
    return path.removeprefix(stack(path)).startswith("blocks.")


def _joined(a: Piece, b: Piece) -> Piece:
    return Piece(
        dense=a.dense + b.dense,
        experts=a.experts + b.experts,
        kept={way: a.kept[way] + b.kept[way] for way in CHECKPOINTING},
        shared=a.shared | b.shared,
        lent=a.lent | b.lent,
        work=a.work + b.work,
        products=(*a.products, *b.products),
        scored=a.scored + b.scored,
        reduced=a.reduced + b.reduced,
        measured=a.measured + b.measured,
        sent=a.sent + b.sent,
        once=a.once + b.once,
        passed=a.passed + b.passed,
    )


def _width(part: Part) -> int:
    """Width of a block's input; 0 outside the blocks, where no stream is saved."""
    return part.stream_width if isinstance(part, Block) else 0


def _divided(node: Node) -> list[Part]:
    """Tables and heads whose vocabulary is divided."""
    return [n.whole for n in node.below() if getattr(n.whole, "n_vocab", 0) != getattr(n.own, "n_vocab", 0)]


def _only_added(block: Block) -> bool:
    """Whether what the last branch gives is only added to the stream: repeating the block ends before it."""
    last = block.branches[-1]
    changed = last.layer_scale or last.gated or last.post_norm is not None or last.sum_norm is not None
    return not changed and last.streams is None and last.beside is None and block.updates is None


@dataclass(frozen=True)
class _Fold:
    """Folds the pieces of the counted tree of one plan, one by one."""

    recipe: Recipe
    adapters: Adapters | None
    at: Slice
    kept: dict[tuple[object, ...], Piece]
    read: dict[str, bool] = field(default_factory=dict)  # pieces whose input another one saves, always or if repeated

    def piece(self, node: Node) -> Piece:
        """Returns one device's share of a single node and everything below it."""
        key = (
            stack(node.path),
            self.read.get(node.path),
            node.whole,
            self.recipe,
            self.adapters,
            replace(self.at, ep=1),
        )
        if key not in self.kept:
            self.kept[key] = replace(self, at=replace(self.at, ep=1)).made(node)
        alike = self.kept[key]
        if self.at.ep == 1:
            return alike
        # expert parallelism divides the experts, and sends rows to them
        sent, once = self._sent(node)
        return replace(alike, experts=self._state_of(node, spread=True), sent=sent, once=once)

    def seeing(self, run: Pass) -> _Fold:
        """Returns the fold of what sees another pass than the model: a head over images one token, a tower these."""
        own = self.at.run
        same = (run.tokens, run.images) == (own.tokens, own.images)
        return self if same else replace(self, at=replace(self.at, run=run, cp=1))

    def idle(self, node: Node) -> Piece:
        """Returns one device's share of weights that are held but neither used in the step nor trained."""
        held = (
            self.recipe.frozen(weight, nf4=False).times(below.count)
            for below in node.below()
            if not below.borrowed
            for weight in below.own.holds().values()
        )
        return Piece(dense=sum(held, State()))

    def made(self, node: Node) -> Piece:
        """Returns a newly folded piece: what every optimizer's step takes, with the state of this one."""
        adapters = self.adapters and replace(self.adapters, nf4=False)
        key = ("stateless", stack(node.path), self.read.get(node.path), node.whole, adapters, self.at)
        if key not in self.kept:
            self.kept[key] = self._stateless(node)
        return replace(
            self.kept[key],
            dense=self._state_of(node, spread=False),
            experts=self._state_of(node, spread=True),
            summed=self._summed(node),
        )

    def _stateless(self, node: Node) -> Piece:
        """Returns a piece without the state of its weights, which optimizers and formats of frozen weights change."""
        inside, run = isinstance(node.whole, Block), self.at.local
        stream = run.rows * _width(node.whole)
        own, remade, shared = self._saved(node)
        full = split(stream * run.width, self.at.by_tokens)
        results = full + listed(node, self.at) if inside else own
        kept = {"none": own, "selective": own - remade, "full": full}
        kept |= {"megatron-selective": own, "torchtitan-op": min(own, results)}
        outer = dict.fromkeys(CHECKPOINTING, own) | {"full": own - self._saved_again(node)}
        sums, summed_again, measured = self._sums(node)
        declared = {way: room(node.own, run, way) for way in CHECKPOINTING}
        bound, ran = memory(node.own).peak_bytes(run), list(node.runs(run)) if inside else []
        return Piece(
            kept=kept if inside else outer,
            shared=shared,
            lent=self._lent(node),
            working={way: bound if found is None else found for way, found in declared.items()},
            bounded=None in declared.values(),
            awaited=sum(memory(below.own).awaits(seen) for below, seen in ran),
            made_again=sum(one.nbytes(run.width) for below, seen in ran for one in memory(below.own).lends(seen)),
            work=self._work(node),
            products=tuple(timed(node, self.at, self.adapters)),
            scored=scored(node, self.at),
            reduced=sums,
            again=summed_again,
            measured=measured,
            passed=self._passed(node),
            spared=self._spared(node.own),
        )

    def _sums(self, node: Node) -> tuple[int, int, int]:
        """Numbers that tensor-parallel ranks sum forward, those of a repeated block, and those of the loss.

        The loss takes the largest logit of each token, the sum of the exponentials, and the logit of the target.
        """
        run = self.at.local
        if self.at.tp == 1:
            return 0, 0, 0
        if not isinstance(node.whole, Block):
            owners = _divided(node)
            widths = sum(getattr(owner, "width", getattr(owner, "d_model", 0)) for owner in owners)
            return run.rows * widths, 0, 3 * run.rows * sum(owner.kind == "head" for owner in owners)
        branches = sum(times_in(node, below) for below in node.below() if isinstance(below.own, Branch))
        each = run.rows * node.whole.branches[0].body.d_model
        return branches * each, (branches - _only_added(node.whole)) * each, 0

    def _spared(self, part: Part) -> int:
        """FLOPs of a feed-forward's last product if it is only added to the stream."""
        if not isinstance(part, Block) or self.adapters is not None or not _only_added(part):
            return 0
        body = part.branches[-1].body
        made = body.multiplies(self.at.run) if isinstance(body, MLP | GatedMLP) else ()
        return split(made[-1].flops, self.at.cp) if made else 0

    def _summed(self, node: Node) -> int:
        """Bytes of gradients of weights in divided bodies that each rank has whole, but for biases after the sum."""
        bodies = [
            f"{child.path}."
            for below in node.below()
            if isinstance(below.whole, Branch)
            for child in below.children
            if child.name == "body" and child.whole != child.own
        ]
        found = 0
        for below in node.below():
            if not f"{below.path}.".startswith(tuple(bodies)) or below.borrowed:
                continue
            shapes = {name: weight.shape for name, weight in below.own.holds().items()}
            sums = isinstance(below.whole, Map) and below.whole.plain.split == "in"
            for name, weight in below.whole.holds().items():
                if weight.shape == shapes[name] and not (sums and name == "bias"):
                    state = self.state(f"{below.path}.{name}", weight, below.own.kind)
                    found += times_in(node, below) * state.gradients
        return found

    def _state_of(self, node: Node, *, spread: bool) -> State:
        """The training state of a device's experts, or of all other weights."""
        total = State()
        for below in node.below():
            if below.borrowed:  # the part that lends the weights trains them
                continue
            stacked = below.own.spreads()
            for name, weight in below.own.holds().items():
                if (name in stacked) == spread:
                    held = self._own_experts(weight) if spread else weight
                    total += self.state(f"{below.path}.{name}", held, below.own.kind).times(times_in(node, below))
        return total

    def _own_experts(self, weight: Weight) -> Weight:
        """The number of a stack's experts on one device."""
        return replace(weight, shape=(split(weight.shape[0], self.at.ep), *weight.shape[1:]))

    def state(self, path: str, weight: Weight, kind: Kind) -> State:
        """Returns the state of a weight, trained or frozen; with adapters all other weights are frozen."""
        if self.adapters is None:
            frozen = weight.frozen or not weight.learned
            return self.recipe.frozen(weight, nf4=False) if frozen else self.recipe.trained(weight, kind)
        if path.endswith(ADAPTER):
            return self.recipe.trained(weight, kind)
        packed = weight.learned and weight.role == "matrix" and in_block(path)
        return self.recipe.frozen(weight, nf4=self.adapters.nf4 and packed)

    def _saved(self, node: Node) -> tuple[int, int, dict[str, int]]:
        """Returns the bytes that the piece saves, those it can recompute, and by name tensors that all pieces share.

        What has a row of whole width for each token is divided by tokens.
        """
        run, dropped = self.at.local, cost.recomputed_tensors(node.own, node.path)
        own, remade, shared = 0, 0, {}
        for key, tensor in cost.saved_tensors(node.own, run, node.path).items():
            if self.read.get(node.path) and key == f"{node.path}:input":
                continue
            if not (node.children or tensor.shared or key.rpartition(":")[0] == node.path):
                continue  # of a tower, whose pieces are apart
            nbytes = tensor.nbytes(run.width)
            if tensor.shared:
                shared[f"{stack(node.path)}{key}"] = nbytes
                continue
            nbytes = split(nbytes, self.at.by_tokens) if tensor.divided == "tokens" else nbytes
            own += nbytes
            remade += nbytes if key in dropped else 0
        return own, remade, shared

    def _saved_again(self, node: Node) -> int:
        """Returns the bytes of a piece's input that another one saves too, if it is repeated."""
        if self.read.get(node.path, True):
            return 0
        nbytes = cost.saved_tensors(node.own, self.at.local, node.path)[f"{node.path}:input"].nbytes(
            self.at.local.width
        )
        return split(nbytes, self.at.by_tokens)

    def _lent(self, node: Node) -> dict[str, int]:
        """Returns the bytes that repeated blocks keep for each other, by name."""
        found: dict[str, int] = {}
        for below, seen in node.runs(self.at.local):
            found |= {f"{stack(node.path)}{name}": size for name, size in memory(below.own).lent_bytes(seen).items()}
        return found

    def _work(self, node: Node) -> Work:
        """The rank's products of a whole sequence, which context parallelism divides evenly.

        What tensor parallelism leaves whole is computed for a share of the tokens.
        """
        kinds = ("trained", "frozen", "scores", "scores_causal", "alone", "alone_causal", "recomputed")
        done = dict.fromkeys(kinds, 0)
        for below, seen in node.runs(self.at.run):
            held, times = below.own.local_weights(), times_in(node, below)
            for product in below.own.multiplies(seen):
                if product.caching:
                    continue
                if product.no_gradient:  # replicated: what chooses keys is needed by all heads
                    done["alone"] += times * product.flops
                    done["alone_causal"] += times * product.causal_flops
                    continue
                if product.weight is None:
                    done["scores"] += times * product.flops
                    done["scores_causal"] += times * product.causal_flops
                    done["recomputed"] += times * product.flops * product.recomputed
                    continue
                frozen = self.adapters is not None and not product.weight.endswith(ADAPTER)
                ways = 1 if splits(held, product.weight) else self.at.by_tokens
                flops = times * split(product.flops, ways)
                done["frozen" if frozen or product.one_gradient else "trained"] += flops
                done["recomputed"] += flops * product.recomputed
        return Work(**{name: split(flops, self.at.cp) for name, flops in done.items()})

    def _sent(self, node: Node) -> tuple[int, int]:
        """Numbers sent to experts in one forward pass, of every chosen row, and of every token once.

        They are those of each part's widest product with distributed weights.
        """
        if self.at.ep == 1:
            return 0, 0
        rows, once = 0, 0
        for below, seen in node.runs(self.at.local):
            of_experts = [p.a for p in below.own.multiplies(seen) if p.weight in below.own.spreads()]
            rows += times_in(node, below) * max(of_experts, default=0)
            once += times_in(node, below) * seen.rows * bool(of_experts)
        width = _width(node.own)
        return split(rows, self.at.by_tokens) * width, split(once, self.at.by_tokens) * width

    def _passed(self, node: Node) -> int:
        """Bytes of keys and values that a rank of a context sends in a forward pass: as many as other ranks have.

        Round a ring go those within a window alone.
        """
        if self.at.cp == 1:
            return 0
        own, seen = self.at.local, self.at.run.tokens
        others = seen - own.tokens
        passed = sum(
            times_in(node, below)
            * r.size
            * (others if self.at.gathers else min(r.tokens_kept(seen), others))
            * r.number_bytes(own.width)
            for below in node.below()
            for r in below.own.remembers()
        )
        return own.batch * int(passed)


def _logits(spec: Model, root: Node, run: Pass, at: Slice) -> int:
    """Bytes of a rank's logits: of its columns, padded if the degree does not divide them, or of its tokens."""
    whole = cost.logits_bytes(spec, run)
    n_vocab, own = (getattr(getattr(part, "head", None), "n_vocab", 0) for part in (root.whole, root.own))
    if at.tp == 1 or not n_vocab:
        return whole
    return whole // n_vocab * own if own < n_vocab else split(whole, at.by_tokens)


def _read_once(root: Node) -> bool:
    """Whether the loss can be in the place of the logits: of one product and nothing else."""
    own = getattr(root.own, "head", None)
    return isinstance(own, Head | TiedHead) and own.scale == 1.0 and own.softcap is None


def _copied(root: Node, fold: _Fold) -> State:
    """Weights of other pieces that the head multiplies, by their absolute paths: a tied embedding."""
    head = getattr(root.own, "head", None)
    heads = () if head is None else walk(head)
    products = [product for _, part in heads for product in part.multiplies(fold.at.local)]
    wanted = {p.weight[1:] for p in products if p.weight is not None and p.weight.startswith("/")}
    if not wanted:
        return State()
    found: dict[str, tuple[Weight, Kind]] = {
        f"{path}.{name}": (weight, part.kind) for path, part in walk(root.own) for name, weight in part.holds().items()
    }
    return sum((fold.state(path, *found[path]) for path in sorted(wanted)), State())
