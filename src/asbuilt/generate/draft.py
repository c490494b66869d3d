"""Drafts for speculative decoding: proposed tokens, and the rule by which the model accepts or rejects them.

Leviathan et al. 2022 (arXiv 2211.17192): of tokens drafted from a distribution q the model, whose own is p, accepts
each with probability min(1, p/q), and replaces the first that it rejects by one drawn from max(0, p - q), rescaled. The
text is then distributed as without drafts; greedy text, for which p and q are certain, is the same.

One text at a time. Shapes: tokens T, vocabulary V, model width M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from asbuilt import spec
from asbuilt.errors import InputError
from asbuilt.generate.sampling import Sampling, penalise_repetition, seen_tokens, suppressed, timed, transform
from asbuilt.kernels.rows import row_products
from asbuilt.nn.cache import Cache, Mark
from asbuilt.nn.fused_predictor import FusedPredictor
from asbuilt.nn.language_model import LanguageModel, Predictor
from asbuilt.nn.model import Model
from asbuilt.spec import MixtureOfExperts
from asbuilt.spec.model import Model as ModelSpec
from asbuilt.spec.part import Kernel, walk

# Tokens per step, unless said otherwise or there are as many predictors.
USUAL = 4


class Draft(NamedTuple):
    """A proposed token, and the probabilities (V) from which it was drawn; None if it was certain."""

    token: int
    q_V: Tensor | None


def acceptance(p_V: Tensor, draft: Draft) -> float:
    """Returns the probability with which a drafted token x is accepted: min(1, p(x) / q(x))."""
    q = 1.0 if draft.q_V is None else float(draft.q_V[draft.token])
    return min(1.0, float(p_V[draft.token]) / q)


def residual(p_V: Tensor, draft: Draft) -> Tensor:
    """Returns the probabilities (V) of the token in place of a rejected one: max(0, p - q), divided by its sum."""
    if draft.q_V is None:
        left_V = p_V.clone()
        left_V[draft.token] = 0.0
    else:
        left_V = (p_V - draft.q_V).clamp(min=0.0)
    total = left_V.sum()
    return left_V / total if bool(total > 0) else p_V  # nothing is left only where rounding made p and q differ


class Chooser:
    """Draws tokens as one request's settings say, and accepts or rejects drafts.

    Its random numbers are the request's own, but more are drawn than without drafts: equal seeds give equal texts only
    with equal drafts. Greedy decoding draws none. `begun` is the length of the text before the first new token.
    """

    def __init__(self, sampling: Sampling, begun: int | None = None) -> None:
        self.sampling, self.begun = sampling, begun
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def probabilities(self, logits_V: Tensor, text: Sequence[int]) -> Tensor:
        """Returns the probabilities (V) of the token after a text, in float64: of one alone, if greedy.

        Raises InputError if the logits do not define probabilities.
        """
        said = self.sampling
        logits_V = logits_V.float() if logits_V.dtype in (torch.bfloat16, torch.float16) else logits_V
        if said.repetition_penalty != 1:
            seen_V = seen_tokens(text, len(logits_V), logits_V.device)
            logits_V = penalise_repetition(logits_V, seen_V, said.repetition_penalty)
        logits_V = suppressed(logits_V, said, first=len(text) == self.begun)
        logits_V = logits_V if said.times is None else timed(logits_V[None], said.times, [text[self.begun or 0 :]])[0]
        if said.temperature == 0:
            p_V = torch.zeros(len(logits_V), dtype=torch.float64, device=logits_V.device)
            p_V[logits_V.max(-1).indices] = 1.0
            return p_V
        p_V = transform(logits_V[None], said)[0].softmax(-1, dtype=torch.float64)
        if not bool(p_V.isfinite().all()):  # else a draft could be accepted by a comparison with NaN
            raise InputError("not finite", field="logits", fix="run the models in float32, or check their weights")
        return p_V

    def draw(self, p_V: Tensor) -> int:
        """Returns the token at which the cumulative probability exceeds a random number."""
        cumulative = p_V.cumsum(-1)
        at = int(torch.searchsorted(cumulative, cumulative[-1:] * self._random(), right=True))
        return at if at < len(p_V) else int(p_V.nonzero()[-1])  # the product may be rounded up to the sum

    def verified(self, logits_TV: Tensor, drafts: Sequence[Draft], text: Sequence[int]) -> list[int]:
        """Returns the accepted drafts and one more token, by the logits after the text and after each draft."""
        new: list[int] = []
        for logits_V, draft in zip(logits_TV, drafts, strict=False):
            p_V = self.probabilities(logits_V, [*text, *new])
            if self._random() >= acceptance(p_V, draft):
                return [*new, self.draw(residual(p_V, draft))]
            new.append(draft.token)
        return [*new, self.draw(self.probabilities(logits_TV[-1], [*text, *new]))]

    def _random(self) -> float:
        if self.sampling.temperature == 0:
            return 0.5  # every decision is certain
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


class Drafter:
    """Base of what proposes a text's next tokens: `count` of them per step, `usual` ones if None.

    `passes` are those of the model that decoded, `proposed` the drafted tokens and `accepted` the accepted ones, of the
    last text.
    """

    usual: int = USUAL
    sees: bool = False  # whether it drafts beside images and sounds too

    def __init__(self, count: int | None = None) -> None:
        if count is not None and (type(count) is not int or count < 1):
            raise InputError(field="draft_tokens", value=count, allowed="a whole number of at least 1")
        self.count = count
        self.passes = self.proposed = self.accepted = 0

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models with which it drafts, beside the one that decodes."""
        return ()

    def check(self, model: ModelSpec) -> None:
        """Raises InputError unless it can draft for this model."""

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """Prepares for one text of up to `capacity` tokens; prompts are read in chunks of `chunk`, None for whole."""
        self.passes = self.proposed = self.accepted = 0
        self.chunk = chunk
        self.kernel: Kernel = kernel

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """Passes what the model computes on to the drafter."""
        yield

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        """Returns up to `count` tokens that may follow the text."""
        raise NotImplementedError

    def count_pass(self, drafts: int, accepted: int) -> None:
        """Counts a pass in which so many drafts were verified, of which so many were accepted."""
        self.passes, self.proposed, self.accepted = self.passes + 1, self.proposed + drafts, self.accepted + accepted

    @property
    def per_step(self) -> int:
        """Tokens per step."""
        return self.usual if self.count is None else self.count


class PromptLookup(Drafter):
    """Proposes what followed the last occurrence in the text of its last tokens, up to `longest` of them.

    No model drafts: good for answers that repeat their prompt, such as summaries and edited code.
    """

    sees = True

    def __init__(self, count: int | None = None, longest: int = 3) -> None:
        super().__init__(count)
        self.longest = longest
        self.n_vocab: float = math.inf  # that of the model, once it has begun

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """See `Drafter.begin`."""
        super().begin(model, capacity, chunk=chunk, kernel=kernel)
        self.n_vocab = model.spec.n_vocab

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        """See `Drafter.propose`; nothing from a token on that the model reads but never predicts, as of an image."""
        tokens = list(text)
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            last = tokens[-size:]
            for at in range(len(tokens) - 1, size - 1, -1):
                if tokens[at - size : at] == last:
                    for i in range(at, at + count):  # what repeats itself goes on so
                        tokens.append(tokens[i])
                    return [Draft(token, None) for token in takewhile(lambda one: one < self.n_vocab, tokens[-count:])]
        return []


class DraftModel(Drafter):
    """Drafts with a smaller model of the same vocabulary, within that model's context."""

    def __init__(self, model: Model, count: int | None = None) -> None:
        super().__init__(count)
        self.model = model

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """See `Drafter.models`."""
        return (self.model.spec,)

    def check(self, model: ModelSpec) -> None:
        """See `Drafter.check`."""
        _require_text_alone(model)
        check_pair(model, self.model.spec)

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """See `Drafter.begin`."""
        super().begin(model, capacity, chunk=chunk, kernel=kernel)
        own = self.model
        self.cache = Cache(own.spec, batch=1, capacity=capacity, dtype=own.dtype, device=own.device, chunk=chunk)
        self.read: list[int] = []
        self.mark: Mark | None = None

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        """See `Drafter.propose`."""
        if len(text) + count - 1 > self.model.spec.max_positions:
            return []
        pairs = enumerate(zip(self.read, text[:-1], strict=False))  # the last token is read in any case
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.read), len(text) - 1))
        if same < len(self.read):
            assert self.mark is not None
            self.cache.rewind(self.mark, same)
            del self.read[self.cache.lengths[0] :]
        logits_V = self._fed(text[len(self.read) :])
        self.mark = self.cache.mark(count - 1)
        drafts: list[Draft] = []
        while True:
            q_V = chooser.probabilities(logits_V, [*text, *(draft.token for draft in drafts)])
            drafts.append(Draft(chooser.draw(q_V), q_V))
            if len(drafts) == count:
                return drafts
            logits_V = self._fed([drafts[-1].token])

    def _fed(self, tokens: Sequence[int]) -> Tensor:
        """Returns the logits (V) after these tokens."""
        self.read += tokens
        logits_BTV = None
        for start in range(0, len(tokens), self.chunk or len(tokens)):
            part = tokens[start : start + (self.chunk or len(tokens))]
            ids_1T = torch.tensor([part], device=self.model.device)
            reach = (len(self.read),)
            logits_BTV = self.model(ids_1T, cache=self.cache, reach=reach, last=True, kernel=self.kernel)
        assert logits_BTV is not None
        return logits_BTV[0, -1]


class StreamDrafter(Drafter):
    """Base of what reads the model's own stream: it keeps the outputs of watched modules, token by token."""

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """See `Drafter.begin`."""
        super().begin(model, capacity, chunk=chunk, kernel=kernel)
        self.target = model
        self.first = 0  # the position of the first kept output
        self.seen: list[Tensor | None] = [None for _ in self.watched(model)]

    def watched(self, model: Model) -> list[nn.Module]:
        """Returns the modules, called with (x, step), whose outputs it reads."""
        raise NotImplementedError

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """See `Drafter.watching`."""
        hooks = [module.register_forward_hook(self._keeping(i)) for i, module in enumerate(self.watched(model))]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keeping(self, i: int) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...], made_1TM: Tensor) -> None:
            old, before = self.seen[i], given[-1].past[0] - self.first
            if old is None or before <= 0:  # tokens may be read again, further back than is of use
                self.seen[i] = made_1TM[:, -before:] if before else made_1TM
            else:
                self.seen[i] = torch.cat((old[:, :before], made_1TM), 1)

        return keep

    def streams(self, start: int, stop: int) -> list[Tensor]:
        """Returns the outputs (1, T, M) of the tokens in a range of positions, and forgets those before it."""
        found = []
        for i, tensor in enumerate(self.seen):
            assert tensor is not None
            self.seen[i] = tensor[:, start - self.first :]
            found.append(tensor[:, start - self.first : stop - self.first])
        self.first = start
        return found


class Predictors(StreamDrafter):
    """Drafts with the model's own predictors, one token each; the last one goes on as often as asked.

    Predictor k reads, for each position t, the stream of predictor k-1 there (of the model, if it is the first) and
    token t+k, and has its own cache. To go on, the last one reads its own stream as that of the next position.
    """

    def check(self, model: ModelSpec) -> None:
        """See `Drafter.check`; a model may read images, but none are given then."""
        if model.reads != ("tokens", "images"):
            _require_text_alone(model)
        if not isinstance(model, spec.LanguageModel) or not model.predictors:
            raise InputError(
                "the model has no predictors of its own",
                field="draft",
                value="own",
                fix="name a draft model, or prompt",
            )

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """See `Drafter.begin`."""
        assert isinstance(model, LanguageModel)
        described = cast(spec.LanguageModel, model.spec)
        self.usual = len(described.predictors)
        super().begin(model, capacity, chunk=chunk, kernel=kernel)
        used = described.predictors[: self.per_step]
        self.predictors = [cast(Predictor, module) for module in model.predictors[: len(used)]]
        self.caches = [
            Cache(
                part,
                batch=1,
                capacity=capacity + self.per_step,
                dtype=model.dtype,
                device=model.device,
                path=f"predictors.{i}",
            )
            for i, part in enumerate(used)
        ]

    def watched(self, model: Model) -> list[nn.Module]:
        """See `StreamDrafter.watched`."""
        return [model.blocks[-1]]

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        """See `Drafter.propose`.

        Up to position `sure` all predictors read tokens of the text alone; beyond it their caches hold drafts.
        """
        if len(text) < 2:
            return []
        start, stop, used = self.caches[0].lengths[0], len(text) - 1, len(self.predictors)
        sure = max(start, len(text) - used)
        (stream_1TM,) = self.streams(start, stop)
        merge = self.target.streams
        stream_1TM = stream_1TM if merge is None else merge(stream_1TM)
        stream_1TM = self.target.normed(stream_1TM) if self.predictors[0].normed else stream_1TM
        tokens: list[int] = list(text)
        drafts: list[Draft] = []
        marks: list[Mark] = []
        for i in range(count):
            k = min(i, used - 1)
            if i < used:
                after, at = tokens[start + i + 1 :], sure - start
                sure_1TM = self._run(k, after[:at], stream_1TM[:, :at])
                marks.append(self.caches[k].mark(stop - sure + count))
                stream_1TM = torch.cat((sure_1TM, self._run(k, after[at:], stream_1TM[:, at:])), 1)
            else:
                stream_1TM = self._run(k, tokens[-1:], stream_1TM[:, -1:])
            scores_11V = self.predictors[k].scores(stream_1TM[:, -1:], self.target.scores)
            q_V = chooser.probabilities(scores_11V[0, -1], tokens)
            drafts.append(Draft(chooser.draw(q_V), q_V))
            tokens.append(drafts[-1].token)
        for cache, mark in zip(self.caches, marks, strict=False):
            cache.rewind(mark, mark.length)
        return drafts

    def _run(self, k: int, tokens: Sequence[int], stream_1TM: Tensor) -> Tensor:
        """Returns the stream (1, T, M) of predictor k at the next positions of its cache."""
        model, made = self.target, [stream_1TM[:, :0]]
        size = self.chunk or max(1, len(tokens))
        for at in range(0, len(tokens), size):
            ids_1T = torch.tensor([tokens[at : at + size]], device=model.device)
            step = model.begin((1, ids_1T.shape[1]), model.device, self.caches[k], None, self.kernel)
            step.table = model.table
            with row_products(model.dtype, model.device, ids_1T.numel()):
                made.append(self.predictors[k].states(ids_1T, stream_1TM[:, at : at + size], step))
        return torch.cat(made, 1)


class FusedStreams(StreamDrafter):
    """Drafts with a layer that reads the model's streams after some of its blocks (EAGLE-3), one token after the other.

    For the second and further tokens it reads its own stream, as that of the next position.
    """

    def __init__(self, layer: FusedPredictor, blocks: Sequence[int], count: int | None = None) -> None:
        super().__init__(count)
        self.layer, self.blocks = layer, tuple(blocks)

    def check(self, model: ModelSpec) -> None:
        """See `Drafter.check`."""
        _require_text_alone(model)
        check_layer(model, self.layer.part)

    def begin(self, model: Model, capacity: int, *, chunk: int | None, kernel: Kernel) -> None:
        """See `Drafter.begin`."""
        super().begin(model, capacity, chunk=chunk, kernel=kernel)
        self.cache = Cache(
            self.layer.part, batch=1, capacity=capacity + self.per_step, dtype=model.dtype, device=model.device
        )

    def watched(self, model: Model) -> list[nn.Module]:
        """See `StreamDrafter.watched`."""
        return [model.blocks[number - 1] for number in self.blocks]

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        """See `Drafter.propose`."""
        if len(text) < 2:
            return []
        start, tokens = self.cache.lengths[0], list(text)
        model, layer = self.target, self.layer
        h_1TM = layer.joined(self.streams(start, len(text) - 1))
        size, made = self.chunk or len(text), h_1TM
        for at in range(0, h_1TM.shape[1], size):
            made = self._run(tokens[start + at + 1 : start + at + 1 + size], h_1TM[:, at : at + size])
        drafts: list[Draft] = []
        mark = self.cache.mark(count)
        while True:
            with row_products(model.dtype, model.device, 1):
                logits_V = layer.scores(made[:, -1:])[0, -1]
            q_V = chooser.probabilities(logits_V, tokens)
            drafts.append(Draft(chooser.draw(q_V), q_V))
            tokens.append(drafts[-1].token)
            if len(drafts) == count:
                self.cache.rewind(mark, mark.length)
                return drafts
            made = self._run(tokens[-1:], made[:, -1:])

    def _run(self, tokens: Sequence[int], h_1TM: Tensor) -> Tensor:
        """Returns the layer's stream (1, T, M) at the next positions."""
        model, ids_1T = self.target, torch.tensor([tokens], device=self.target.device)
        step = model.begin((1, ids_1T.shape[1]), model.device, self.cache, None, self.kernel)
        with row_products(model.dtype, model.device, ids_1T.numel()):
            return self.layer.states(ids_1T, h_1TM, step)


def check_layer(model: ModelSpec, layer: spec.FusedPredictor) -> None:
    """Raises InputError unless a draft layer reads this model's vocabulary and streams."""
    for field, own, other in (
        ("vocab_size", layer.embedding.n_vocab, model.n_vocab),
        ("target_hidden_size", layer.d_target, model.stream_width),
    ):
        if own != other:
            raise InputError(f"the draft layer's {field} differs", field="draft", value=own, allowed=f"{other}")


def check_pair(model: ModelSpec, draft: ModelSpec) -> None:
    """Raises InputError unless the second model can draft for the first."""
    if not draft.generates or draft.reads != ("tokens",):
        raise InputError("the draft model does not generate text from text alone", field="draft", value=draft.name)
    if draft.n_vocab != model.n_vocab:
        raise InputError(
            "the draft model has another vocabulary",
            field="draft",
            value=f"n_vocab = {draft.n_vocab}",
            allowed=f"n_vocab = {model.n_vocab}, as in {model.name}",
            fix="choose a smaller model of the same family",
        )


def _require_text_alone(model: ModelSpec) -> None:
    if model.reads != ("tokens",):
        raise InputError(
            f"only prompt lookup drafts for a model that reads {', '.join(model.reads)}",
            field="draft",
            value=model.name,
            allowed="prompt",
        )


def require_steady(model: ModelSpec) -> None:
    """Raises InputError for a model whose result for a token depends on how many others are in its pass."""
    for path, part in ((f"blocks.{i}.{path}", part) for i, b in enumerate(model.blocks) for path, part in walk(b)):
        if isinstance(part, MixtureOfExperts) and part.capacity is not None:
            raise InputError(
                "experts with a capacity drop tokens by the pass, so several at once are not as one by one",
                field="draft",
                value=path,
            )
