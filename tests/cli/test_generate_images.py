"""`asbuilt generate --image`: the tokens that transformers generates from the same files, on small random models."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    LlamaConfig,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import asbuilt
from asbuilt.checkpoint.source import open_model

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


CONFIGS: dict[str, Callable[..., Any]] = {"qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "llava": _llava}


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


def _theirs(model: Any, processor: Any, files: list[Path], folder: Path) -> list[int]:  # noqa: ANN401
    given = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")
    grids = given.get("image_grid_thw")
    counts = [4] * len(files) if grids is None else (grids.prod(1) // 4).tolist()
    around = ([], []) if grids is None else ([6], [7])
    seen = [token for n in counts for token in (*around[0], *[PLACE] * n, *around[1])]
    begin, ids = _ids(folder)
    prompt = torch.tensor([[*begin, *seen, *ids]])
    kinds = {} if grids is None else {"mm_token_type_ids": (prompt == PLACE).int()}
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **given, **kinds)
    return out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_an_image_gives_the_tokens_that_transformers_gives(run: Run, family: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model, processor, end = _folder(family, folder)
    files = _pictures(tmp_path)
    want = _theirs(model, processor, files, folder)
    options = [word for file in files for word in ("--image", file)]
    said = run("generate", folder, PROMPT, *options, "--max-new-tokens", NEW, "--json")
    assert said.exit_code == 0, said.output
    tokens = json.loads(said.stdout)["tokens"]
    assert tokens == want[: len(tokens)]
    assert len(tokens) == NEW or tokens[-1] == end
    begin, ids = _ids(folder)
    placed = [*begin, *([6, PLACE, 7, 6, PLACE, 7] if family != "llava" else [PLACE, PLACE]), *ids]
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
