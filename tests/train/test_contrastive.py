"""Contrastive pairs: the loss is transformers' own, runs resume, what is exported is CLIP, and bad pairs are named."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_runs import killed_at, log, require_equal, state
from transformers import CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from asbuilt import InputError, load
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train import loop
from asbuilt.train.batch import ImageTexts
from asbuilt.train.contrastive import MOST, contrastive_loss, pair_loss, retrieval, start_temperature, towers
from asbuilt.train.image_texts import Paired, drawn_shapes
from asbuilt.train.recipe import Recipe, read

TOWER = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=32")
WORDS = ("red", "blue", "cat", "dog", "sky", "été")


def recipe(folder: Path, out: str, *changes: str) -> Recipe:
    """The shipped recipe, smaller."""
    small = [f"model.config.{which}_config.{one}" for which in ("text", "vision") for one in TOWER]
    sizes = ["model.config.vision_config.image_size=16", "model.config.projection_dim=8", "data.batch=6"]
    steps = ["run.steps=6", "run.save_every=2", "run.log_every=1", "run.validate_every=3", "data.tokenizer=bytes"]
    context = ["data.context=40", "model.config.text_config.max_position_embeddings=40", "schedule.warmup=1"]
    return read("clip", [*small, *sizes, *steps, *context, f"run.out={folder / out}", *changes])


def image(file: Path) -> None:
    pixels = torch.randint(256, (random.randint(9, 30), random.randint(9, 30), 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)


def lines(folder: Path, count: int = 24) -> Path:
    """Images of any size, and JSON lines of them."""
    folder.mkdir(exist_ok=True)
    said = []
    for number in range(count):
        image(folder / f"{number}.png")
        said.append({"image": f"{number}.png", "caption": " ".join(random.choices(WORDS, k=3))})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in said), encoding="utf-8")
    return file


def files(folder: Path) -> Path:
    """A folder of images with a text each."""
    folder.mkdir()
    for number in range(20):
        image(folder / f"{number}.{random.choice(('png', 'jpg'))}")
        (folder / f"{number}.txt").write_text(" ".join(random.choices(WORDS, k=2)) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["drawn", "lines", "folder"])
def test_pairs_train_and_resume_bit_by_bit(tmp_path: Path, kind: str) -> None:
    named = {
        "drawn": lambda: "drawn:shapes",
        "lines": lambda: lines(tmp_path / "d"),
        "folder": lambda: files(tmp_path / "d"),
    }
    more = [f"data.text={named[kind]()}", *(["data.key=caption"] if kind == "lines" else [])]
    outcome = loop.run(recipe(tmp_path, "whole", *more))
    made = recipe(tmp_path, "stopped", *more)
    killed_at(made, random.choice((3, 4, 5)))
    loop.run(made, resume=True)
    require_equal(state(tmp_path / "whole", 6), state(tmp_path / "stopped", 6))
    assert log(tmp_path / "whole") == log(tmp_path / "stopped")
    assert outcome.validation is not None
    last = log(tmp_path / "whole")[-1]
    assert last["candidates"] == {"drawn": 72, "lines": 2, "folder": 2}[kind]
    assert 0.0 <= last["texts_found"] <= 1.0


def test_what_is_exported_is_clip_with_the_same_similarities_and_loss(tmp_path: Path) -> None:
    """transformers reads weights, tokenizer and how images are prepared, and computes similarities and loss."""
    where = lines(tmp_path / "d", 12)
    # RGB is resized by Pillow in both
    loop.run(recipe(tmp_path, "run", f"data.text={where}", "data.key=caption", "optimizer.lr=0.01"))
    exported = tmp_path / "run" / "model"
    ours, theirs = load(exported), CLIPModel.from_pretrained(exported, attn_implementation="eager").eval()
    said = [json.loads(line) for line in where.read_text(encoding="utf-8").splitlines()][:5]
    images = [Image.open(where.parent / one["image"]).convert("RGB") for one in said]
    pixels = CLIPImageProcessor.from_pretrained(exported)(images, return_tensors="pt")["pixel_values"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(exported / "tokenizer.json"))
    end = Tokenizer.from_file(exported)
    ids = [[*tokenizer.encode(one["caption"]), ours.spec.head.end] for one in said]  # type: ignore[union-attr]
    assert end.encode(said[0]["caption"]) == ids[0][:-1]
    batch = next(
        iter(loop.prepare(recipe(tmp_path, "other", f"data.text={where}", "data.key=caption")).data.validation())
    )
    assert isinstance(batch, ImageTexts)
    longest = max(map(len, ids))
    rows = torch.tensor([[*one, *[ours.spec.head.end] * (longest - len(one))] for one in ids])  # type: ignore[union-attr]
    with torch.no_grad():
        found = theirs(input_ids=rows, pixel_values=pixels, return_loss=True)
        made = ours(rows, images=pixels)
        torch.testing.assert_close(made, found.logits_per_image, rtol=1e-4, atol=1e-4)
        # their loss is the mean of both cross-entropies over the pairs, in float32
        assert float(pair_loss(made).nats) / len(rows) == pytest.approx(float(found.loss), abs=1e-5)
        assert (made - theirs(input_ids=rows.flip(0), pixel_values=pixels).logits_per_image).abs().max() > 1e-3


def test_files_are_prepared_as_transformers_does(tmp_path: Path) -> None:
    where = lines(tmp_path / "d", 6)
    run = loop.prepare(recipe(tmp_path, "run", f"data.text={where}", "data.key=caption", "data.validation=0"))
    objective, said = run.data.objective, run.vocabulary.beside["preprocessor_config.json"]  # type: ignore[union-attr]
    assert isinstance(objective, Paired)
    batch = objective(run.data.pairs)  # type: ignore[union-attr]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    images = [Image.open(row.image).convert("RGB") for row in run.data.pairs]  # type: ignore[union-attr]
    theirs = CLIPImageProcessor.from_pretrained(tmp_path)(images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batch.images, theirs, rtol=1e-5, atol=1e-2)


def test_the_loss_starts_at_that_of_chance_and_the_temperature_is_bounded(tmp_path: Path) -> None:
    run = loop.prepare(recipe(tmp_path, "run"))
    scale = towers(run.model).vision.scale.detach()  # shares its memory
    assert float(scale) == pytest.approx(math.log(1 / 0.07))
    with torch.no_grad():
        scale.zero_()  # all similarities are within 1 of each other
    batch = run.data.batch(0)
    assert isinstance(batch, ImageTexts)
    assert float(contrastive_loss(run.model, batch).nats) / 6 == pytest.approx(math.log(6), abs=0.5)
    with torch.no_grad():
        scale.fill_(9.0)
    run.step()
    assert float(scale) == pytest.approx(MOST)
    start_temperature(run.model)
    assert float(scale) < MOST


def test_accumulated_batches_are_contrasted_each_alone(tmp_path: Path) -> None:
    run = loop.prepare(recipe(tmp_path, "run", "step.accumulate=2"))
    batches = [run.data.batch(i) for i in range(2)]
    wanted = sum(float(contrastive_loss(run.model, one).nats) for one in batches if isinstance(one, ImageTexts))
    assert run.step().loss == pytest.approx(wanted / 12, abs=1e-5)


def test_retrieval_counts_the_nearest_and_any_pair_of_the_same_text(tmp_path: Path) -> None:
    run = loop.prepare(recipe(tmp_path, "run"))
    batch = run.data.batch(0)
    assert isinstance(batch, ImageTexts)
    with torch.no_grad():
        near = run.model(batch.ids, images=batch.images)
    own = torch.arange(len(near))
    found = retrieval(run.model, [batch])
    assert found.texts == pytest.approx(float((near.argmax(1) == own).float().mean()))
    assert found.images == pytest.approx(float((near.argmax(0) == own).float().mean()))
    same = ImageTexts(ids=batch.ids[:1].expand(6, -1), targets=batch.targets[:1].expand(6, -1), images=batch.images)
    assert retrieval(run.model, [same]) == (1.0, 1.0, 6)


def test_drawn_shapes_are_always_the_same_and_each_another() -> None:
    one, other = list(drawn_shapes()), list(drawn_shapes())
    assert len({pair.text for pair in one}) == len(one) == 720
    for number in random.sample(range(720), 5):
        assert one[number].text == other[number].text
        first, second = (pairs[number].image.drawn(24) for pairs in (one, other))  # type: ignore[union-attr]
        assert torch.equal(first, second)
        colour = torch.tensor(one[number].image.colour, dtype=torch.float32)  # type: ignore[union-attr]
        nearest = (first.float() - 0.9 * colour[:, None, None]).abs().sum(0).min()
        assert float(nearest) < 130  # there is something of its colour


def refusals(folder: Path) -> dict[str, tuple[list[str], str]]:
    empty, odd, lone = folder / "empty", folder / "odd", folder / "lone"
    for one in (empty, odd, lone):
        one.mkdir()
    (odd / "notes.md").write_text("x")
    image(lone / "a.png")
    broken = lines(folder / "b", 3)
    broken.write_text('{"image": "0.png"}\n')
    absent = folder / "absent.jsonl"
    absent.write_text('{"image": "no.png", "text": "x"}\n')
    blind = lines(folder / "c", 12)
    (folder / "c" / "1.png").write_bytes(b"no image")
    (folder / "c" / "2.png").write_bytes(b"no image")
    siglip = ["model.config.model_type=siglip"]
    return {
        "no text": (["data.text="], "data.text: missing"),
        "another kind": (["data.text=a.csv"], "data.text: has no pairs"),
        "empty": ([f"data.text={empty}"], "has no images"),
        "odd": ([f"data.text={odd}"], "neither an image nor the text of one"),
        "lone": ([f"data.text={lone}"], "the text of a.png"),
        "a line": ([f"data.text={broken}"], "line 1: is no pair"),
        "absent": ([f"data.text={absent}"], "line 1"),
        "not an image": ([f"data.text={blind}", "data.key=caption"], "cannot be read as an image"),
        "z-loss": (["step.z_loss=0.1"], "step.z_loss: not part of the loss of pairs"),
        "packing": (["data.packing=documents"], "data.packing"),
        "context": (["data.context=99"], "data.context: must be at most 40"),
        "siglip": (siglip, "model"),
        "a decoder": (["data.objective=next", "data.text=x"], "data.text"),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        "no text",
        "another kind",
        "empty",
        "odd",
        "lone",
        "a line",
        "absent",
        "not an image",
        "z-loss",
        "packing",
        "context",
        "siglip",
        "a decoder",
    ],
)
def test_what_is_no_pair_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    changes, said = refusals(tmp_path)[wrong]
    with pytest.raises(InputError) as refused:
        loop.run(recipe(tmp_path, "run", *changes))
    assert said in str(refused.value)


def test_the_shipped_recipe_suits_its_data(tmp_path: Path) -> None:
    made = loop.prepare(read("clip", [f"run.out={tmp_path / 'run'}"]))
    assert made.vocabulary.n_vocab == made.model.spec.n_vocab == 320
    assert made.data.batch(0).ids.shape[0] == 72
