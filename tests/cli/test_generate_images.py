"""`asbuilt generate --image`: the tokens that transformers generates from the same files, on small random models."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from click.testing import Result
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Lfm2Config,
    Lfm2VlConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Siglip2VisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import asbuilt
from asbuilt.checkpoint.source import open_model
from asbuilt.kernels.image_grid import row_by_row
from asbuilt.media.image import Preparation
from asbuilt.nn.image_grid import Patches

Run = Callable[..., Result]
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = SIZES | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
TOWER: dict[str, Any] = {"depth": 3, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
TOWER |= {"out_hidden_size": 32}
CUTS: dict[str, Any] = {"patch_size": 4, "min_pixels": 200, "max_pixels": 600}
PLACE, NEW, PROMPT = 5, 8, "as built"
AROUND: dict[str, Any] = {"vision_start_token_id": 6, "vision_end_token_id": 7}


def _qwen2_5(**text: Any) -> Qwen2_5_VLConfig:  # noqa: ANN401
    del text["head_dim"]
    tower = TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
    inner = text | {"rope_parameters": ROPE}
    return Qwen2_5_VLConfig(text_config=inner, vision_config=tower, image_token_id=PLACE, **AROUND)


def _qwen3(**text: Any) -> Qwen3VLConfig:  # noqa: ANN401
    tower = TOWER | {"num_position_embeddings": 9, "deepstack_visual_indexes": [0, 2]}
    return Qwen3VLConfig(
        text_config=text | {"rope_parameters": ROPE}, vision_config=tower, image_token_id=PLACE, **AROUND
    )


def _llava(**text: Any) -> LlavaConfig:  # noqa: ANN401
    sizes: dict[str, Any] = SIZES | {"image_size": 8, "patch_size": 4}
    tower = CLIPVisionConfig(**sizes)
    return LlavaConfig(text_config=LlamaConfig(**text), vision_config=tower, image_token_index=PLACE)


def _lfm2(**text: Any) -> Lfm2VlConfig:  # noqa: ANN401
    del text["head_dim"]
    inner = Lfm2Config(**text, layer_types=["conv", "full_attention"], block_multiple_of=4)
    sizes: dict[str, Any] = SIZES | {"patch_size": 4, "num_patches": 9, "vision_use_head": False}
    tower = Siglip2VisionConfig(**sizes)
    return Lfm2VlConfig(text_config=inner, vision_config=tower, image_token_id=PLACE, projector_hidden_size=20)


def _mistral3(**text: Any) -> Mistral3Config:  # noqa: ANN401
    tower = PixtralVisionConfig(**SIZES, patch_size=4, image_size=32)
    return Mistral3Config(
        text_config=MistralConfig(**text, sliding_window=None),
        vision_config=tower,
        image_token_index=PLACE,
        spatial_merge_size=2,
    )


def _pixtral(**text: Any) -> LlavaConfig:  # noqa: ANN401
    tower = PixtralVisionConfig(**SIZES, patch_size=4, image_size=32)
    return LlavaConfig(
        text_config=MistralConfig(**text, sliding_window=None),
        vision_config=tower,
        image_token_index=PLACE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


CONFIGS: dict[str, Callable[..., Any]] = {
    "mistral3": _mistral3,
    "pixtral": _pixtral,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "llava": _llava,
    "lfm2_vl": _lfm2,
}
TILES: dict[str, Any] = {"encoder_patch_size": 4, "min_image_tokens": 3, "max_image_tokens": 8, "tile_size": 16}
TILES |= {"max_tiles": 2, "max_pixels_tolerance": 1.2}
WORDS = ("<|image_start|>", "<|img_row_1_col_1|>", "<|img_row_2_col_1|>", "<|img_thumbnail|>", "<|image_end|>")


def _pictures(folder: Path) -> list[Path]:
    files = []
    for i, size in enumerate(((20, 31), (40, 14))):
        numbers = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(numbers).save(folder / f"{i}.png")
        files.append(folder / f"{i}.png")
    return files


def _folder(family: str, folder: Path) -> tuple[Any, Any, int]:
    """Writes a random model and its preprocessor; returns transformers' model and processor, and the end token."""
    folder.mkdir()
    n_vocab, end = write_tokenizer(folder)
    config = CONFIGS[family](**TEXT, vocab_size=n_vocab, eos_token_id=end, pad_token_id=0, bos_token_id=1)
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    if family == "llava":
        sizes: dict[str, Any] = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
        kind, processor = "CLIPImageProcessor", CLIPImageProcessorPil(**sizes)
    elif family == "mistral3":
        sizes, kind = {"size": {"longest_edge": 29}, "patch_size": 4}, "PixtralImageProcessorFast"
        processor = PixtralImageProcessorPil(size={"longest_edge": 29}, patch_size=8)  # as in their processor
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4, "spatial_merge_size": 2}))
    elif family == "pixtral":
        sizes, kind = {"size": {"longest_edge": 29}, "patch_size": {"height": 4, "width": 4}}, "PixtralImageProcessor"
        processor = PixtralImageProcessorPil(**sizes)
        said = {"patch_size": 4, "image_token": "[IMG]", "image_break_token": "<br>", "image_end_token": "<end>"}
        (folder / "processor_config.json").write_text(json.dumps(said))
    elif family == "lfm2_vl":
        sizes, kind, processor = TILES, "Lfm2VlImageProcessorFast", None
    else:
        sizes, kind, processor = CUTS, "Qwen2VLImageProcessorFast", Qwen2VLImageProcessorPil(**CUTS)
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes | {"image_processor_type": kind}))
    return model.eval(), processor, end


def _ids(folder: Path) -> tuple[list[int], list[int]]:
    """The tokens that begin a text, and those of the prompt with what ends it."""
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    ids, wrapped = tokenizer.encode(PROMPT), tokenizer.encode(PROMPT, wrap=True)
    begin = wrapped.index(ids[0])
    return wrapped[:begin], wrapped[begin:]


def _tiles(folder: Path, files: list[Path]) -> tuple[dict[str, Any], list[int]]:
    """What their model takes of tiles, which are prepared as tests/media proves, and what stands for them in a text.

    The second image is cut into two tiles, one above the other, and the first is not.
    """
    found = Preparation.read(folder).of(files)
    assert isinstance(found, Patches)
    assert len(found) == 4
    each = found.values.split([rows * columns for _, rows, columns in found.grids])
    rows = [row_by_row(x[None], grid[1:], 2)[0] for x, grid in zip(each, found.grids, strict=True)]
    flat = [x.unflatten(1, (3, 16)).transpose(1, 2).flatten(1) for x in rows]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(x)).long() for x in flat], batch_first=True)
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    begin, *marks, end = map(tokenizer.encode, WORDS)
    tiles = [[PLACE] * (len(x) // 4) for x in flat]
    seen = [begin, tiles[0], end, begin, marks[0], tiles[1], marks[1], tiles[2], marks[2], tiles[3], end]
    shapes = torch.tensor([grid[1:] for grid in found.grids])
    padded = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
    return {"pixel_values": padded, "pixel_attention_mask": mask, "spatial_shapes": shapes}, [*chain(*seen)]


def _theirs(family: str, model: Any, processor: Any, files: list[Path], folder: Path) -> list[int]:  # noqa: ANN401
    if processor is None:
        given, seen = _tiles(folder, files)
    else:
        given = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")
        grids = given.get("image_grid_thw")
        if "image_sizes" in given:
            after = {"pixtral": ("<br>", "<end>", 4), "mistral3": ("[IMG_BREAK]", "[IMG_END]", 8)}
            seen = _rows(folder, given["image_sizes"].tolist(), *after[family])
            return _continued(model, folder, given, seen)
        counts = [4] * len(files) if grids is None else (grids.prod(1) // 4).tolist()
        around = ([], []) if grids is None else ([6], [7])
        seen = [token for n in counts for token in (*around[0], *[PLACE] * n, *around[1])]
    return _continued(model, folder, given, seen)


def _rows(folder: Path, sizes: list[list[int]], between: str, end: str, side: int) -> list[int]:
    """Rows of placeholders, of `side` pixels each, with a word after each row, another after the last."""
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    after, last = map(tokenizer.encode, (between, end))
    rows = [(high // side, [PLACE] * (wide // side)) for high, wide in sizes]
    return [*chain(*([*chain(*[[*row, *after]] * (n - 1)), *row, *last] for n, row in rows))]


def _continued(model: Any, folder: Path, given: Any, seen: list[int]) -> list[int]:  # noqa: ANN401
    begin, ids = _ids(folder)
    prompt = torch.tensor([[*begin, *seen, *ids]])
    kinds = {} if "image_grid_thw" not in given else {"mm_token_type_ids": (prompt == PLACE).int()}
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **given, **kinds)
    return out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_an_image_gives_the_tokens_that_transformers_gives(run: Run, family: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model, processor, end = _folder(family, folder)
    files = _pictures(tmp_path)
    want = _theirs(family, model, processor, files, folder)
    options = [word for file in files for word in ("--image", file)]
    said = run("generate", folder, PROMPT, *options, "--max-new-tokens", NEW, "--json")
    assert said.exit_code == 0, said.output
    tokens = json.loads(said.stdout)["tokens"]
    assert tokens == want[: len(tokens)]
    assert len(tokens) == NEW or tokens[-1] == end
    begin, ids = _ids(folder)
    placed = [*begin, *([6, PLACE, 7, 6, PLACE, 7] if "qwen" in family else [PLACE, PLACE]), *ids]
    assert asbuilt.generate(str(folder), placed, images=files, max_new_tokens=NEW) == tokens


@pytest.mark.parametrize(
    ("prompt", "images", "named"),
    [
        ([PLACE, 9, 10], 2, "prompt: wrong number of image placeholders"),
        ([9] * 250, 1, "prompt: longer than the context"),
    ],
    ids=range(2),
)
def test_placeholders_that_do_not_fit_are_refused(
    run: Run, prompt: list[int], images: int, named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    _folder("qwen3_vl", folder)
    with pytest.raises(asbuilt.InputError, match=named):
        asbuilt.generate(str(folder), prompt, images=_pictures(tmp_path)[:images], max_new_tokens=NEW)


def test_a_model_of_texts_sees_no_image(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    said = run("generate", checkpoint, PROMPT, "--image", _pictures(tmp_path)[0])
    assert said.exit_code == 2
    assert "reads no images" in said.output
