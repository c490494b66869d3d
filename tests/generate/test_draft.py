"""Speculative decoding: the rule, the same text and distribution as without drafts, caches taken back, predictors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from small_tiles import PLACE, tiled_seer
from strategies import SEEDS, randomised, specs, texts, translators
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.generate.draft import (
    Chooser,
    Draft,
    Drafter,
    DraftModel,
    Predictors,
    PromptLookup,
    acceptance,
    residual,
)
from asbuilt.generate.sampling import Sampling
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.language_model import LanguageModel as Built
from asbuilt.nn.model import Model
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    LanguageModel,
    MixtureOfExperts,
    Pass,
    Predictor,
    RMSNorm,
    Rotary,
    TokenEmbedding,
    walk,
)
from asbuilt.spec.positions import rotaries_by_length

NEW = 12


def said(model: Model, prompt: list[int], draft: Drafter | None, n: int = NEW, **options: Any) -> list[int]:  # noqa: ANN401
    """The tokens that follow a prompt."""
    steps = generate(model, [prompt], max_new_tokens=n, draft=draft, **options)
    return [token for (token,) in steps if token is not None]


@st.composite
def distributions(draw: st.DrawFn, n: int = 5) -> Tensor:
    """Probabilities of n tokens, some of them 0."""
    weights = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any))
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@given(distributions(), distributions())
def test_the_rule_gives_the_models_distribution(p_V: Tensor, q_V: Tensor) -> None:
    """The sum over drafts of q(x) (accepted: x; rejected: the residual) is p: arXiv 2211.17192, appendix A.1."""
    made_V = torch.zeros_like(p_V)
    for token in q_V.nonzero()[:, 0].tolist():
        draft = Draft(token, q_V)
        accepted = acceptance(p_V, draft)
        made_V[token] += q_V[token] * accepted
        if accepted < 1:
            made_V += q_V[token] * (1 - accepted) * residual(p_V, draft)
    torch.testing.assert_close(made_V, p_V, rtol=0, atol=1e-12)


@given(distributions(), st.integers(0, 4))
def test_the_rule_with_a_certain_draft(p_V: Tensor, token: int) -> None:
    draft = Draft(token, None)
    accepted = acceptance(p_V, draft)
    made_V = accepted * torch.eye(5, dtype=torch.float64)[token]
    made_V += 0 if accepted == 1 else (1 - accepted) * residual(p_V, draft)
    torch.testing.assert_close(made_V, p_V, rtol=0, atol=1e-12)


def untied(model: Model, prompt: list[int], tokens: list[int]) -> None:
    """Leaves out texts in which the two largest logits at a position are so near that rounding decides."""
    logits_TV = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
    if len(logits_TV):
        first, second = logits_TV.topk(2).values.unbind(-1)
        assume(bool((first - second > 1e-7 * first.abs().clamp(min=1)).all()))


def steady(spec: LanguageModel) -> LanguageModel:
    """Without dynamic frequencies, which drafting refuses."""
    assume(not rotaries_by_length(spec))
    assume(spec.n_vocab > 1)
    return spec


class Scripted(Drafter):
    """Drafts what it is told, right or wrong."""

    def __init__(self, script: Sequence[int], count: int) -> None:
        super().__init__(count)
        self.script = script

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        return [Draft(token, None) for token in self.script[len(text) : len(text) + count]]


@given(specs().map(steady), SEEDS, st.integers(1, 6), st.data())
@torch.no_grad()
def test_greedy_text_is_the_same_whatever_is_drafted(
    spec: LanguageModel, seed: int, count: int, data: DataObject
) -> None:
    """With every mixer and kind of cache: drafts that are right up to a point, wrong after it."""
    model = randomised(spec, seed)
    (prompt,) = data.draw(texts(spec.n_vocab, rows=1, max_tokens=10))
    n = min(NEW, spec.max_positions - len(prompt))
    want = said(model, prompt, None, n)
    untied(model, prompt, want)
    wrong = data.draw(st.lists(st.booleans(), min_size=len(want), max_size=len(want)))
    script = [*prompt, *((token + w) % spec.n_vocab for token, w in zip(want, wrong, strict=True))]
    draft = Scripted(script, count)
    assert said(model, prompt, draft, n) == want
    assert draft.accepted <= draft.proposed
    drafters = (PromptLookup(count), DraftModel(model, count), *([Predictors(count)] if spec.predictors else []))
    other = data.draw(st.sampled_from(drafters))
    assert said(model, prompt, other, n, prefill_chunk=data.draw(st.sampled_from([None, 1, 3]))) == want
    assert other.accepted == other.proposed or not isinstance(other, DraftModel)


@given(specs().map(steady), SEEDS, st.integers(1, 6), st.data())
@torch.no_grad()
def test_greedy_text_is_the_same_with_any_draft_model(
    spec: LanguageModel, seed: int, count: int, data: DataObject
) -> None:
    model, other = randomised(spec, seed), randomised(spec, seed + 1)
    (prompt,) = data.draw(texts(spec.n_vocab, rows=1, max_tokens=10))
    n = min(NEW, spec.max_positions - len(prompt))
    want = said(model, prompt, None, n)
    untied(model, prompt, want)
    assert said(model, prompt, DraftModel(other, count), n) == want


@given(translators(), SEEDS, st.data())
@torch.no_grad()
def test_a_decoders_text_is_the_same_with_prompt_lookup(spec: Any, seed: int, data: DataObject) -> None:  # noqa: ANN401
    steady(spec)
    assume(all(not isinstance(p, MixtureOfExperts) or p.capacity is None for b in spec.blocks for _, p in walk(b)))
    model = randomised(spec, seed)
    (prompt,) = data.draw(texts(spec.prompted.n_vocab, rows=1, max_tokens=6))
    want = said(model, prompt, None, start=[0], n=8)
    assert said(model, prompt, PromptLookup(3), start=[0], n=8) == want
    with pytest.raises(InputError, match="only prompt lookup drafts for a model that reads"):
        said(model, prompt, DraftModel(model), start=[0])


def stack(n_vocab: int = 7, d_model: int = 8, window: int | None = 3, **changes: Any) -> LanguageModel:  # noqa: ANN401
    """A stack with norms around one block of windowed attention."""
    attention = Attention(
        d_model=d_model, n_heads=2, n_kv_heads=1, d_head=4, window=window, positions=Rotary(theta=50.0, d_rotary=4)
    )
    norm = RMSNorm(d=d_model)
    block = Block(
        branches=(
            Branch(name="attention", norm=norm, body=attention),
            Branch(name="ffn", norm=norm, body=GatedMLP(d_model=d_model, d_ff=6, activation="silu")),
        )
    )
    fields: dict[str, Any] = {
        "embedding": TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        "embedding_norm": norm,
        "blocks": (block,),
        "norm": norm,
        "head": Head(d_model=d_model, n_vocab=n_vocab),
        "max_positions": 64,
    }
    return LanguageModel(**fields | changes)


def with_predictors(spec: LanguageModel, n: int) -> LanguageModel:
    """The stack with predictors made of its own parts."""
    embedding, head, norm = spec.embedding, spec.head, spec.norm
    assert isinstance(head, Head)
    assert isinstance(embedding, TokenEmbedding)
    assert norm is not None
    one = Predictor(embedding=embedding, token_norm=norm, stream_norm=norm, block=spec.blocks[0], norm=norm, head=head)
    return replace(spec, predictors=(one,) * n)


@given(SEEDS, st.integers(1, 3), st.integers(1, 6), st.integers(0, 20), st.booleans())
@torch.no_grad()
def test_predictors_that_copy_the_model_are_always_right(
    seed: int, n: int, count: int, length: int, greedy: bool
) -> None:
    """Each copy reads the token alone; with a window, text long before makes no difference."""
    model = randomised(with_predictors(stack(), n), seed)
    weights = dict(model.named_parameters())
    for i in range(n):
        for path, weight in weights.items():
            _, _, rest = path.partition(f"predictors.{i}.")
            if rest and not rest.startswith("join"):
                source = rest.replace("token_norm", "embedding_norm").replace("block.", "blocks.0.")
                weight.copy_(weights.get(source, weight))
        weights[f"predictors.{i}.join.weight"].copy_(torch.eye(8, 16))
    prompt = [(3 * i + i * i) % 7 for i in range(6 + length)]
    draft = Predictors(count)
    sampling = Sampling() if greedy else Sampling(temperature=0.7, seed=seed)
    tokens = said(model, prompt, draft, 20, sampling=sampling)
    if greedy:
        assert tokens == said(model, prompt, None, 20)
    assert draft.accepted == draft.proposed
    assert draft.passes == 1 + -(-19 // (count + 1))  # the prompt's, and one for count drafts and a token of its own
    assert draft.proposed == 20 - draft.passes


class Watched(Predictors):
    """Keeps what was proposed after each text."""

    def begin(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        super().begin(*given, **named)
        self.made: list[tuple[list[int], list[int]]] = []

    def propose(self, text: Sequence[int], count: int, chooser: Chooser) -> list[Draft]:
        drafts = super().propose(text, count, chooser)
        self.made.append((list(text), [draft.token for draft in drafts]))
        return drafts


def by_the_paper(model: Built, text: list[int], n: int) -> list[int]:
    """What n predictors say after a text, each over the whole text and the drafts so far, without caches.

    DeepSeek-V3 (arXiv 2412.19437), equations 21 to 23: position i joins its last stream with token i + k. Those that
    are not `normed` read streams before their norms.
    """
    tokens = torch.tensor([text])
    stream = model.stream(tokens, model.begin((1, len(text)), tokens.device, None, None, "reference"))[:, :-1]
    assert isinstance(model.spec, LanguageModel)
    normed = model.spec.predictors[0].normed
    stream = model.normed(stream) if normed else stream
    for k in range(n):
        step = model.begin((1, stream.shape[1]), tokens.device, None, None, "reference")
        predictor: Any = model.predictors[k]
        token, step.table = tokens[:, k + 1 :], model.table
        joined = torch.cat((predictor.token_norm(predictor.embedding(token, step)), predictor.stream_norm(stream)), -1)
        step.tokens_BT = token
        made = predictor.block(predictor.join(joined), step)
        stream = predictor.norm(made) if normed else made
        scores = predictor.scores(stream, model.scores)[:, -1:]
        tokens = torch.cat((tokens, scores.argmax(-1)), 1)
    return tokens[0, len(text) :].tolist()


@settings(max_examples=15)
@given(specs().map(steady).filter(lambda spec: spec.predictors), SEEDS, st.integers(1, 3), st.data())
@torch.no_grad()
def test_predictors_propose_what_the_paper_says(spec: LanguageModel, seed: int, n: int, data: DataObject) -> None:
    model = randomised(replace(spec, predictors=spec.predictors * n), seed)
    assert isinstance(model, Built)
    (prompt,) = data.draw(texts(spec.n_vocab, rows=1, max_tokens=10))
    room = min(NEW, spec.max_positions - len(prompt))
    draft = Watched()
    tokens = said(model, prompt, draft, room)
    untied(model, prompt, tokens)
    for text, made in draft.made:
        if len(text) > 1:
            assert made == by_the_paper(model, text, len(made))


@given(specs(), st.integers(1, 9), st.integers(0, 9))
def test_predictors_are_billed_where_they_run(spec: LanguageModel, tokens: int, past: int) -> None:
    run = Pass(tokens=tokens, past=past)
    alone = [cost.flops(part, run).forward for part in spec.predictors]
    both = replace(run, predictors=True)
    assert cost.flops(spec, both).forward == cost.flops(spec, run).forward + sum(alone)
    bytes_of = [cost.moved(part, run, "bf16", "bf16").total for part in spec.predictors]
    assert cost.moved(spec, both, "bf16", "bf16").total == cost.moved(spec, run, "bf16", "bf16").total + sum(bytes_of)
    caches = [
        Cache(part, batch=1, capacity=tokens, dtype=torch.float32, path=f"predictors.{i}")
        for i, part in enumerate(spec.predictors)
    ]
    more = cost.cache(spec, tokens, "fp32", predictors=True).at_seq - cost.cache(spec, tokens, "fp32").at_seq
    assert more == sum(cache.nbytes for cache in caches)
    last = cost.flops(spec, replace(both, logits="last")).products
    heads = sum(2 * part.d_model * part.head.n_vocab * (tokens - 1) for part in spec.predictors)
    assert (
        last
        == cost.flops(spec, replace(run, logits="last")).products
        + sum(cost.flops(part, run).products for part in spec.predictors)
        - heads
    )


def chi_square(counts: dict[Any, int], expected: dict[Any, float], n: int) -> None:
    """The counts are those of n draws with the expected probabilities, within six standard deviations of chi-square."""
    assert counts.keys() <= {key for key, p in expected.items() if p > 0}
    value = sum((counts.get(key, 0) - n * p) ** 2 / (n * p) for key, p in expected.items() if p > 0)
    degrees = sum(p > 0 for p in expected.values()) - 1
    assert value < degrees + 6 * (2 * degrees) ** 0.5


def joint(model: Model, prompt: list[int], sampling: Sampling, n: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of n tokens after a prompt."""
    chooser, found = Chooser(sampling), {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, p in found.items():
            p_V = chooser.probabilities(model(torch.tensor([[*prompt, *text]]))[0, -1], [*prompt, *text])
            longer |= {(*text, i): p * float(p_V[i]) for i in range(len(p_V))}
        found = longer
    return found


SAMPLINGS = (
    Sampling(temperature=0.8),
    Sampling(temperature=1.5, top_k=2),
    Sampling(temperature=1.0, repetition_penalty=1.5),
)


@pytest.mark.parametrize(("kind", "sampling"), tuple(zip(("model", "prompt", "own"), SAMPLINGS, strict=True)))
@torch.no_grad()
def test_sampled_texts_are_distributed_as_without_drafts(kind: str, sampling: Sampling) -> None:
    seed, n, prompt = 3, 600, [0, 1, 2, 0, 1]
    model = randomised(with_predictors(stack(n_vocab=3), 1), seed, std=0.7)
    other = randomised(stack(n_vocab=3, window=None), seed + 1, std=0.7)
    drafts: dict[str, Drafter] = {"model": DraftModel(other, 2), "prompt": PromptLookup(2), "own": Predictors(2)}
    draft, counts, proposed, accepted = drafts[kind], {}, 0, 0
    for i in range(n):
        text = tuple(said(model, prompt, draft, 3, sampling=replace(sampling, seed=1000 + i)))
        counts[text] = counts.get(text, 0) + 1
        proposed, accepted = proposed + draft.proposed, accepted + draft.accepted
    chi_square(counts, joint(model, prompt, sampling, 3), n)
    assert 0 < accepted < proposed


def test_what_cannot_be_drafted() -> None:
    model = build(stack())
    with pytest.raises(InputError, match="no predictors of its own"):
        said(model, [1], Predictors())
    with pytest.raises(InputError, match="another vocabulary"):
        said(model, [1], DraftModel(build(stack(n_vocab=8))))
    with pytest.raises(InputError, match="one prompt at a time"):
        generate(model, [[1], [2]], max_new_tokens=1, draft=PromptLookup())
    with pytest.raises(InputError, match="draft_tokens"):
        PromptLookup(0)
    broken = build(stack())
    with torch.no_grad():
        broken.get_parameter("head.weight").fill_(float("nan"))
    with pytest.raises(InputError, match="logits: not finite"):
        said(model, [1, 2], DraftModel(broken), sampling=Sampling(temperature=1.0))
    longest = 3
    short = DraftModel(build(stack(max_positions=longest)), 2)
    assert len(said(model, [1, 2], short, 6)) == 6
    assert short.proposed <= 2  # none beyond its context


def test_prompt_lookup_goes_on_as_before() -> None:
    chooser = Chooser(Sampling())
    propose = lambda text, count: [d.token for d in PromptLookup().propose(text, count, chooser)]  # noqa: E731
    assert propose([1, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9]
    assert propose([7, 5, 5], 3) == [5, 5, 5]
    assert propose([3, 8, 2, 3, 9, 2, 3], 1) == [9]  # the last of both, and of the longest run
    assert propose([1, 2, 3], 4) == []
    assert propose([1], 4) == []


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@torch.no_grad()
def test_tokens_that_are_read_and_never_predicted(penalty: float) -> None:
    """An image's placeholder is beyond the vocabulary: it is neither drafted, nor is it a token to repeat."""
    model, sampling = randomised(tiled_seer(), 0), Sampling(repetition_penalty=penalty)
    assert model.spec.n_vocab <= PLACE < model.spec.n_rows
    lookup = PromptLookup(3)
    images = Tiles(torch.rand(1, 3, 2, 4, 4, dtype=torch.float64), ((1, 2),))
    for prompt in ([PLACE, 1, 2], [1, 2, PLACE, 3, 1, 2]):
        wanted = said(model, prompt, None, images=images, sampling=sampling)
        assert said(model, prompt, lookup, images=images, sampling=sampling) == wanted
    for text, drafts in (([1, PLACE, 2, 1], []), ([1, 2, PLACE, 1], [2])):
        assert [draft.token for draft in lookup.propose(text, 3, Chooser(sampling))] == drafts


@settings(max_examples=10)
@given(SEEDS, st.integers(1, 4))
@torch.no_grad()
def test_suppressed_tokens_are_neither_drafted_nor_accepted(seed: int, count: int) -> None:
    """The first token after the prompt has some of its own, whatever is drafted after it."""
    model, prompt = randomised(with_predictors(stack(), 1), seed), [1, 2, 3, 1, 2]
    plain = said(model, prompt, None, 20)
    sampling = Sampling(suppress=(plain[5],), suppress_first=(plain[0], plain[1]))
    wanted = said(model, prompt, None, 20, sampling=sampling)
    assert plain[5] not in wanted
    assert wanted[0] not in (plain[0], plain[1])
    for draft in (Predictors(count), PromptLookup(count), DraftModel(model, count)):
        assert said(model, prompt, draft, 20, sampling=sampling) == wanted
