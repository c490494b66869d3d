"""Texts with sounds in them: what cannot be placed is refused by name, and each row hears its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_sounds import HEARER, HEARING, PROJECTOR, TEXT, TOWER

from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.generate.seeing import with_placeholders
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.vision import MLPProjector as Built
from asbuilt.spec import AudioLanguageModel, LanguageModel, MLPProjector

some = settings(max_examples=10)


@given(strategies.listeners(), strategies.SEEDS)
@some
@torch.no_grad()
def test_a_text_without_sounds_is_the_language_models_own(spec: AudioLanguageModel, seed: int) -> None:
    whole, text = strategies.randomised(spec, seed), build(spec.text, dtype=torch.float64, seed=None)
    assert type(spec.text) is LanguageModel
    text.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("hearing.")})
    ids, place = (
        torch.randint(spec.n_vocab, (2, 5), generator=torch.Generator().manual_seed(seed)),
        spec.hearing.placeholder,
    )
    ids = ids.masked_fill(ids == place, (place + 1) % spec.n_vocab)
    assert torch.equal(whole(ids), text(ids))


@given(strategies.listeners(), st.integers(1, 3))
@some
@torch.no_grad()
def test_each_texts_sounds_are_its_own(spec: AudioLanguageModel, padding: int) -> None:
    """A row alone, padded on the left, gives what it gives among others."""
    model, tokens = strategies.randomised(spec, 2), spec.image_tokens + 3
    ids, beside = measured.given(model, torch.arange(2 * tokens).remainder(spec.n_vocab).view(2, -1), 1)
    audio = beside["audio"].to(torch.float64)
    whole = model(ids, audio=audio)
    other = (spec.hearing.placeholder + 1) % spec.n_vocab
    padded = torch.cat((torch.full((1, padding), other), ids[1:]), 1)
    valid = torch.arange(padded.shape[1])[None] >= padding
    alone = model(padded, audio=audio[1:], valid_BT=valid)
    torch.testing.assert_close(alone[:, padding:], whole[1:])


def test_vectors_of_a_sound_are_joined_in_order() -> None:
    part = MLPProjector(widths=(6, 4), activation="gelu", stack=3)
    x = torch.arange(2 * 6 * 2.0).view(2, 6, 2)
    joined = Built(part, "projector").merged(x, None)
    assert joined.shape == (2, 2, 6)
    assert joined[0, 1].tolist() == [6, 7, 8, 9, 10, 11]


def test_wrong_sounds_are_refused_by_name() -> None:
    model = strategies.randomised(HEARER, 0, torch.float32)
    ids = torch.tensor([[1, 1, 0, 2]])
    audio = torch.zeros(1, 3, 8)
    model(ids, audio=audio)
    with pytest.raises(InputError, match="audio: wrong size"):
        model(ids, audio=audio[..., :-1])
    with pytest.raises(InputError, match=r"wrong number of sound placeholders.*2 of token 1 for each of 2 sounds"):
        model(ids, audio=torch.cat((audio, audio)))
    with pytest.raises(InputError, match="audio: not an input of LanguageModel"):
        strategies.randomised(TEXT, 0, torch.float32)(ids, audio=audio)


def test_placeholders_of_sounds_in_a_prompt() -> None:
    audio, none = torch.zeros(2, 3, 8), ([], [])
    assert with_placeholders(HEARER, [0, 2], audio, after=1, around=none) == [0, 1, 1, 1, 1, 2]
    assert with_placeholders(HEARER, [0, 1, 2, 1], audio, around=none) == [0, 1, 1, 2, 1, 1]
    assert with_placeholders(HEARER, [1, 1, 1, 1, 0], audio, around=none) == [1, 1, 1, 1, 0]
    with pytest.raises(InputError, match="wrong number of sound placeholders"):
        with_placeholders(HEARER, [1, 0], audio, around=none)


def test_prompts_of_unlike_lengths_and_numbers_of_sounds() -> None:
    """Two sounds in the first text, one in the second, none in the third: each writes what it writes alone."""
    model = strategies.randomised(HEARER, 3, torch.float32)
    audio = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(0))
    prompts, own = [[0, 1, 1, 2, 1, 1], [1, 1, 0], [2]], (audio[:2], audio[2:], None)
    together = torch.tensor(list(generate(model, prompts, max_new_tokens=4, audio=audio))).T.tolist()
    for prompt, heard, wanted in zip(prompts, own, together, strict=True):
        alone = [token for (token,) in generate(model, [prompt], max_new_tokens=4, audio=heard, prefill_chunk=2)]
        assert alone == wanted


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"projector": replace(PROJECTOR, stack=1)}, "projector"),
        ({"projector": MLPProjector(widths=(3 * TOWER.d_model, 6), activation="gelu", stack=3)}, "projector"),
        ({"projector": MLPProjector(widths=(4 * TOWER.d_model, 6), activation="gelu", merge=2)}, "projector"),
        ({"placeholder": -1}, "placeholder"),
        ({"tower": TEXT}, "tower"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=rf"Hearing\.{field}"):
        replace(HEARING, **changes)  # type: ignore[arg-type]


def test_stacks_and_squares_exclude_each_other() -> None:
    for merge, stack in ((2, 2), (1, 3), (1, 0)):
        with pytest.raises(InputError, match="stack"):
            MLPProjector(widths=(8, 4), activation="gelu", merge=merge, stack=stack)
    with pytest.raises(InputError, match="hearing"):
        AudioLanguageModel.of(TEXT, replace(HEARING, projector=replace(PROJECTOR, widths=(2 * TOWER.d_model, 5))))
