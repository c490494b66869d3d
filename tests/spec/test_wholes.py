"""Whole models: which one the fields of a `Model` describe, what each reads and gives, and what it refuses by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from small_parts import ATTENTION, CROSS, MODEL, tower

import asbuilt
from asbuilt.catalog import find, names
from asbuilt.errors import InputError
from asbuilt.spec import (
    AudioLanguageModel,
    Block,
    Branch,
    Classifier,
    Contrast,
    DualEncoder,
    EncoderDecoder,
    Head,
    ImageEncoder,
    LanguageModel,
    MLPProjector,
    Model,
    Part,
    Pooler,
    Projection,
    RMSNorm,
    SharedEmbedding,
    TextEncoder,
    TypeEmbedding,
    Vision,
    VisionLanguageModel,
    dumps,
    from_dict,
    loads,
    to_dict,
    walk,
)
from asbuilt.spec.model import ORDER
from asbuilt.spec.whole import ALWAYS, FIELDS, WHOLES

ANY = st.one_of(
    strategies.specs(),
    strategies.encoders(),
    strategies.translators(),
    strategies.towers(),
    strategies.seers(),
    strategies.sensers(),
    strategies.listeners(),
    strategies.tiled_seers(),
    strategies.pairs(),
)
READ = MODEL.changed(head=None)
SEEN = Vision(tower=tower(3), projector=MLPProjector(widths=(7, 11), activation="gelu"), placeholder=1)
COMPARED = Contrast(tower=tower(3, head=Projection(d_model=7, d_out=2)))


def attending(causal: bool) -> tuple[Block, ...]:
    return (Block(branches=(Branch(name="x", body=replace(ATTENTION, causal=causal)),)),)


def given_fields(model: Model) -> dict[str, Any]:
    """Every field that a `Model` once had; those that the whole lacks are None, or none of them."""
    return {name: getattr(model, name, () if name == "predictors" else None) for name in FIELDS}


@given(ANY)
def test_the_fields_of_a_whole_describe_it_again(model: Model) -> None:
    """But a language model that sees ahead, which no field tells from an encoder of texts."""
    again = Model(**given_fields(model))
    if (
        isinstance(model, LanguageModel)
        and not model.decodes
        and not isinstance(model, VisionLanguageModel | AudioLanguageModel)
    ):
        assert type(again) is (LanguageModel if model.predictors else TextEncoder)
    elif isinstance(model, TextEncoder) and model.generates and model.types is model.pooler is None:
        assert type(again) is LanguageModel
    else:
        assert again == model
        assert type(again) is type(model)
        assert model.changed(name=model.name) == model


def old(part: Part) -> Any:  # noqa: ANN401  JSON
    """A spec's JSON as it was written when there was one kind of model, with all of its fields."""
    written = to_dict(part)

    def renamed(plain: Any, of: object) -> Any:  # noqa: ANN401
        if isinstance(of, Model):
            inner = {name: plain.get(name) for name in FIELDS}
            inner["predictors"] = plain.get("predictors", [])
            for name in ("encoder", "vision"):
                if inner[name] is not None:
                    inner[name] = renamed(inner[name], getattr(of, name))
            return inner | {"part": "Model"}
        if isinstance(of, Vision | Contrast):
            return plain | {"tower": renamed(plain["tower"], of.tower)}
        return plain

    return renamed(written, part)


@pytest.mark.parametrize("name", names())
def test_a_model_of_the_catalogue_is_read_under_the_old_name(name: str) -> None:
    spec = find(name).spec()
    written = old(spec)
    assert written["part"] == "Model"
    assert from_dict(written) == spec
    assert to_dict(spec)["part"] == type(spec).__name__ in {kind.__name__ for kind in WHOLES}


@given(ANY)
def test_a_whole_is_kept_by_all_that_copies_it(model: Model) -> None:
    copies = [loads(dumps(model)), pickle.loads(pickle.dumps(model)), copy.deepcopy(model), replace(model)]
    copies += (
        [model.edit("", name=model.name), model.replace_where(RMSNorm, lambda part: part)]
        if any(isinstance(part, RMSNorm) for _, part in walk(model))
        else []
    )
    for one in copies:
        assert one == model
        assert type(one) is type(model)
        assert repr(one) == repr(model)
    assert repr(model).startswith(f"{type(model).__name__}(")


def test_which_whole_it_is() -> None:
    plain = {"embedding": MODEL.embedding, "blocks": MODEL.blocks, "max_positions": 16}
    head = {"head": MODEL.head}
    vector = {"head": Projection(d_model=11, d_out=2)}
    for said, kind in (
        (plain | head, LanguageModel),
        (plain | head | {"predictors": (), "types": None, "encoder": None}, LanguageModel),
        (plain | head | {"blocks": attending(True)}, LanguageModel),
        (plain | head | {"blocks": attending(False)}, TextEncoder),
        (plain, TextEncoder),
        (plain | {"head": None}, TextEncoder),
        (plain | vector, TextEncoder),
        (plain | head | {"types": TypeEmbedding(n_types=2, d_model=11)}, TextEncoder),
        (plain | head | {"pooler": Pooler(d_model=11)}, TextEncoder),
        (plain | {"embedding": SharedEmbedding(n_vocab=5, d_model=11)}, TextEncoder),
        (plain | head | {"encoder": READ}, EncoderDecoder),
        (plain | {"encoder": READ}, EncoderDecoder),
        (plain | head | {"vision": SEEN}, VisionLanguageModel),
        (plain | vector | {"vision": COMPARED}, DualEncoder),
        (given_fields(tower(3)), ImageEncoder),
    ):
        made = Model(**said)
        assert type(made) is kind, said
        assert isinstance(made, Model)
    assert isinstance(VisionLanguageModel.of(MODEL, SEEN), LanguageModel)
    assert not isinstance(READ, LanguageModel)


@pytest.mark.parametrize(
    ("fields_", "named", "kind"),
    [
        ({"encoder": READ, "types": TypeEmbedding(n_types=2, d_model=11)}, "types", "EncoderDecoder"),
        ({"encoder": READ, "vision": SEEN}, "vision", "EncoderDecoder"),
        ({"vision": SEEN, "pooler": Pooler(d_model=11)}, "pooler", "VisionLanguageModel"),
        ({"vision": COMPARED, "encoder": READ}, "encoder", "DualEncoder"),
        ({"embedding": tower(3).embedding, "vision": SEEN}, "vision", "ImageEncoder"),
    ],
)
def test_fields_that_fit_no_whole_are_refused_by_name(fields_: dict[str, Any], named: str, kind: str) -> None:
    said = given_fields(MODEL) | fields_
    for make in (lambda: Model(**said), lambda: MODEL.changed(**fields_)):
        with pytest.raises(InputError, match=f"fields describe {kind}, which has no {named}") as refused:
            make()
        assert refused.value.field == f"Model.{named}"
        assert refused.value.fix.startswith("it is a field of ")
    written = to_dict(MODEL) | {"part": "Model"} | {name: to_dict(part) for name, part in fields_.items()}
    with pytest.raises(InputError, match=f"which has no {named}"):
        from_dict(written)


def test_unknown_and_missing_fields_of_the_old_name() -> None:
    written = to_dict(MODEL) | {"part": "Model"}
    with pytest.raises(InputError, match=r"spec\.colour: unknown field of Model"):
        from_dict(written | {"colour": 1})
    with pytest.raises(InputError, match="did you mean 'encoder'"):
        from_dict(written | {"encodr": None})
    for name in ALWAYS:
        with pytest.raises(InputError, match=rf"spec\.{name}: missing field of Model"):
            from_dict({key: value for key, value in written.items() if key != name})
    with pytest.raises(InputError, match=r"Model\.colour: unknown field of Model"):
        Model(**given_fields(MODEL), colour=1)  # type: ignore[call-arg]  # pyright: ignore
    with pytest.raises(InputError, match=r"spec\.types: unknown field of LanguageModel"):
        from_dict(to_dict(MODEL) | {"types": None})


def test_a_whole_takes_its_own_fields_alone() -> None:
    for kind in WHOLES:
        own = {field.name for field in fields(kind)}
        for name in FIELDS.keys() - own:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                kind(**{name: None})  # type: ignore[arg-type]  # pyright: ignore


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(MODEL, head=None), "LanguageModel.head"),
        (lambda: replace(MODEL, head=Classifier(d_model=11, n_labels=2)), "LanguageModel.head"),
        (lambda: replace(MODEL, embedding=SharedEmbedding(n_vocab=5, d_model=11)), "LanguageModel.embedding"),
        (lambda: replace(MODEL.changed(vision=SEEN), vision=None), "VisionLanguageModel.vision"),
        (lambda: replace(MODEL.changed(vision=SEEN), head=None), "VisionLanguageModel.head"),
        (lambda: replace(MODEL.changed(vision=SEEN), vision=COMPARED), "VisionLanguageModel.vision"),
        (lambda: replace(MODEL.changed(encoder=READ), encoder=None), "EncoderDecoder.encoder"),
        (lambda: replace(MODEL.changed(encoder=READ), encoder=tower(3)), "EncoderDecoder.encoder"),
        (lambda: replace(MODEL.changed(encoder=READ), encoder=MODEL), "EncoderDecoder.encoder"),
        (lambda: replace(MODEL.changed(encoder=READ), embedding=SharedEmbedding(n_vocab=5, d_model=11)), "embedding"),
        (lambda: replace(READ, embedding=replace(tower(3).embedding, d_model=11)), "TextEncoder.embedding"),
        (lambda: replace(READ, head=Head(d_model=11, n_vocab=6)), "TextEncoder.head"),
        (lambda: replace(tower(3), embedding=MODEL.embedding), "ImageEncoder.embedding"),
        (lambda: DualEncoder(**given_of(DualEncoder), head=MODEL.head, vision=COMPARED), "DualEncoder.head"),  # type: ignore[arg-type]
        (
            lambda: DualEncoder(**given_of(DualEncoder), head=Projection(d_model=11, d_out=2), vision=SEEN),  # type: ignore[arg-type]
            "DualEncoder.vision",
        ),
    ],
)
def test_what_a_whole_cannot_have_is_refused_by_name(make: Any, named: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as refused:
        make()
    assert refused.value.field.endswith(named)


def given_of(kind: type[Model]) -> dict[str, Any]:
    """MODEL's fields that another whole has too, but for the head."""
    own = {field.name for field in fields(kind)} & {field.name for field in fields(MODEL)} - {"head"}
    return {name: getattr(MODEL, name) for name in own}


def test_an_edit_that_a_whole_cannot_have_makes_another_of_it() -> None:
    spec = asbuilt.decoder(d_model=32, n_layers=2, n_heads=2, n_vocab=50)
    for changes, kind, gives in (
        ({"head": None}, TextEncoder, "stream"),
        ({"head": Classifier(d_model=32, n_labels=3)}, TextEncoder, "labels"),
        ({"types": TypeEmbedding(n_types=2, d_model=32)}, TextEncoder, "logits"),
        ({"encoder": spec.changed(head=None)}, EncoderDecoder, "logits"),
        ({"norm": None}, LanguageModel, "logits"),
    ):
        made = spec.edit("", **changes)
        assert (type(made), made.gives) == (kind, gives)
        assert made == spec.changed(**changes)
    ahead = spec.edit("blocks.*.attention.body", causal=False)
    assert type(ahead) is LanguageModel
    assert not ahead.generates
    with pytest.raises(InputError, match=r"TextEncoder\.head: wrong part for TextEncoder"):
        spec.edit("", head=7)
    with pytest.raises(InputError, match="which has no predictors"):
        spec.edit("", encoder=spec.changed(head=None), predictors=(1,))


@pytest.mark.parametrize(
    ("name", "kind", "reads", "gives", "generates"),
    [
        ("llama-2-7b", LanguageModel, ("tokens",), "logits", True),
        ("deepseek-v3", LanguageModel, ("tokens",), "logits", True),
        ("bert-base-uncased", TextEncoder, ("tokens", "types"), "logits", False),
        ("modernbert-base", TextEncoder, ("tokens",), "logits", False),
        ("all-minilm-l6-v2", TextEncoder, ("tokens", "types"), "stream", False),
        ("t5-small", EncoderDecoder, ("tokens", "source"), "logits", True),
        ("vit-base-patch16-224", ImageEncoder, ("images",), "labels", False),
        ("llava-1.5-7b", VisionLanguageModel, ("tokens", "images"), "logits", True),
        ("llama-4-scout", VisionLanguageModel, ("tokens", "images"), "logits", True),
        ("qwen3-vl-2b", VisionLanguageModel, ("tokens", "images"), "logits", True),
        ("voxtral-mini-3b", AudioLanguageModel, ("tokens", "audio"), "logits", True),
        ("clip-vit-base-patch32", DualEncoder, ("tokens", "images"), "similarities", False),
    ],
)
def test_what_published_models_read_and_give(
    name: str, kind: type[Model], reads: tuple[str, ...], gives: str, generates: bool
) -> None:
    spec = find(name).spec()
    assert type(spec) is kind
    assert (spec.reads, spec.gives, spec.generates) == (reads, gives, generates)
    assert (spec.patches is not None) == ("images" in reads)
    assert (spec.prompted is not spec) == ("source" in reads)
    assert bool(spec.image_tokens) == (kind in (VisionLanguageModel, AudioLanguageModel))
    assert (spec.n_vocab > 0) == ("tokens" in reads)


@given(ANY)
def test_parts_come_in_the_order_in_which_they_run(model: Model) -> None:
    found = [name.partition(".")[0] for name, _ in model.children()]
    assert found == sorted(found, key=ORDER.index)
    assert {field.name for field in fields(model)} <= {*ORDER, "name", "max_positions", "d_source"}


@given(strategies.seers())
def test_the_text_of_a_model_with_images(model: VisionLanguageModel) -> None:
    assert type(model.text) is LanguageModel
    assert VisionLanguageModel.of(model.text, model.vision, model.hearing) == model
    assert model.changed(vision=None, hearing=None) == model.text or not model.decodes


def test_a_model_without_what_no_pass_reaches() -> None:
    spec = find("deepseek-v3").spec()
    assert [*spec.extras()]
    assert not [*spec.without_extras.extras()]
    assert spec.without_extras.changed(predictors=spec.predictors) == spec  # type: ignore[attr-defined]  # pyright: ignore
    assert READ.without_extras is READ


def test_a_decoder_that_looks_at_a_source_is_as_wide_as_its_encoder_says() -> None:
    cross = (Block(branches=(Branch(name="x", body=replace(CROSS, d_source=11)),)),)
    assert MODEL.changed(encoder=READ, blocks=cross).source_width == 11
    with pytest.raises(InputError, match=r"LanguageModel\.blocks.*None"):
        replace(MODEL, blocks=cross)
