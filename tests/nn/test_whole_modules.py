"""The modules of whole models: each takes what its spec says it reads, and refuses the rest by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_parts import MODEL, tower

from asbuilt.errors import InputError
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.nn.registry import MODULES, registered
from asbuilt.spec import (
    AudioEncoder,
    Contrast,
    Hearing,
    LanguageModel,
    MelEmbedding,
    MLPProjector,
    Projection,
    TypeEmbedding,
    Vision,
    VisionLanguageModel,
)
from asbuilt.spec import Model as Spec
from asbuilt.spec.whole import WHOLES

READ = MODEL.changed(head=None)
HEARD = AudioEncoder(embedding=MelEmbedding(n_mels=3, n_tokens=4, d_model=11), blocks=MODEL.blocks, max_positions=4)
PREFIXED = MODEL.changed(
    vision=Vision(
        tower=tower(3),
        projector=MLPProjector(widths=(7, 11), activation="gelu"),
        placeholder=1,
        both_ways=True,
        prefix=True,
    )
)
EARS = Hearing(tower=HEARD, projector=MLPProjector(widths=(22, 11), activation="gelu", stack=2), placeholder=1)
SPECS: dict[str, Spec] = {
    "LanguageModel": MODEL,
    "TextEncoder": READ,
    "TextEncoder with types": READ.changed(types=TypeEmbedding(n_types=2, d_model=11)),
    "EncoderDecoder": MODEL.changed(encoder=READ),
    "EncoderDecoder that hears": MODEL.changed(encoder=HEARD),
    "ImageEncoder": tower(3),
    "AudioEncoder": HEARD,
    "VisionLanguageModel": MODEL.changed(
        vision=Vision(tower=tower(3), projector=MLPProjector(widths=(7, 11), activation="gelu"), placeholder=1)
    ),
    "VisionLanguageModel with prefixes": PREFIXED,
    "VisionLanguageModel that hears": PREFIXED.changed(hearing=replace(EARS, placeholder=2)),
    "AudioLanguageModel": MODEL.changed(hearing=EARS),
    "DualEncoder": MODEL.changed(
        head=Projection(d_model=11, d_out=2),
        vision=Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2))),
    ),
}
# Of each argument what a model reads that takes it.
READS = {"types_BT": "types", "source_BS": "source", "source_valid_BS": "source", "images": "images"}
READS |= {"prefix": "prefix", "audio": "audio"}
COMMON = ("cache", "valid_BT", "reach", "last")


def beside(model: Model) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = torch.zeros(2, 6, dtype=torch.long)
    return measured.given(model, ids, images=1)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    spec = SPECS[name]
    assert type(spec).__name__ == name.partition(" ")[0]
    model = strategies.randomised(spec, 0, torch.float32)
    first, given = beside(model)
    with torch.no_grad():
        wanted = model(first, **given)
        for argument in (*READS, "colour"):
            if argument in given or (argument,) == spec.reads:
                continue
            nothing = {argument: None}
            assert torch.equal(model(first, **given, **nothing), wanted), argument  # what is None is not given
            if READS.get(argument) in spec.reads:
                continue
            with pytest.raises(InputError, match=f"not an input of {type(model).__name__}") as refused:
                model(first, **given, **{argument: torch.zeros(2, 6, dtype=torch.long)})
            assert refused.value.field == argument
            assert refused.value.value == (2, 6)
            assert refused.value.fix == f"it reads {', '.join(spec.reads)}"


@pytest.mark.parametrize("kind", WHOLES, ids=lambda kind: kind.__name__)
def test_a_module_says_in_its_signature_what_it_takes(kind: type[Spec]) -> None:
    """It mirrors its part by name and file; what a forward takes beside what all do is what the part can read."""
    module = registered(kind)
    assert module is MODULES[kind]
    assert isinstance(module, type)
    assert issubclass(module, Model)
    assert module.__name__ == kind.__name__
    assert module.__module__ == kind.__module__.replace("asbuilt.spec.", "asbuilt.nn.")
    taken = {*inspect.signature(module.forward).parameters} - {"self", "kernel", "unread"}
    reads = {what for name, spec in SPECS.items() if type(spec) is kind for what in spec.reads}
    if reads in ({"images"}, {"audio"}):
        assert taken == reads
    else:
        assert taken - {"tokens_BT", "documents_BT", *COMMON} == {name for name, what in READS.items() if what in reads}


@given(strategies.seers(), st.integers(0, 2**31))
@torch.no_grad()
def test_a_text_without_images_is_the_language_models_own(spec: VisionLanguageModel, seed: int) -> None:
    """A placeholder beyond the vocabulary aside: the text's module, given the same weights, gives the same."""
    whole, text = strategies.randomised(spec, seed), build(spec.text, dtype=torch.float64, seed=None)
    assert type(spec.text) is LanguageModel
    text.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith(("vision.", "hearing."))})
    ids = torch.randint(spec.n_vocab, (2, 5), generator=torch.Generator().manual_seed(seed))
    if spec.per_layer is not None:  # a placeholder's vectors are padding's, of token 0
        for part in (spec.vision, *(() if spec.hearing is None else (spec.hearing,))):
            ids = ids.masked_fill(ids == part.placeholder, 0)
    assert torch.equal(whole(ids), text(ids))
