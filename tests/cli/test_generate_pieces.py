"""`asbuilt generate --image` of pictures in tiles and in patches of grids: transformers' tokens, of small models.

The pixels are those of asbuilt, which tests/media proves equal to transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from byte_tokenizer import write_tokenizer
from click.testing import Result
from PIL import Image
from torch.nn.functional import fold, unfold
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    InternVLConfig,
    InternVLVisionConfig,
    Kimi_K25Config,
    Llama4Config,
    Llama4TextConfig,
    Llama4VisionConfig,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Qwen2Config,
    Step3p7Config,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLVisionConfig

import asbuilt
from asbuilt.api.chat import open_chat
from asbuilt.checkpoint.source import open_model
from asbuilt.kernels.image_grid import row_by_row
from asbuilt.media.image import Preparation
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.pieces import Pieces
from asbuilt.text.tokenizer import Tokenizer

# transformers 5.24's wrapper asks its text's output for this, which has none
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]  # pyright: ignore

Run = Callable[..., Result]
PLACE, NEW, PROMPT = 5, 8, "as built"
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 512}
AXIAL = {"rope_type": "axial", "rope_theta": 20.0}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}


def _internvl(**ends: Any) -> InternVLConfig:  # noqa: ANN401
    tower = InternVLVisionConfig(**SIZES, image_size=[8, 8], patch_size=[2, 2])
    text = Qwen2Config(**TEXT, **ends, tie_word_embeddings=False)
    return InternVLConfig(text_config=text, vision_config=tower, image_token_id=PLACE, tie_word_embeddings=False)


def _llama4(**ends: Any) -> Llama4Config:  # noqa: ANN401
    own: dict[str, Any] = TEXT | {"head_dim": 16, "num_local_experts": 3, "intermediate_size_mlp": 21}
    text = Llama4TextConfig(**own, **ends, attention_chunk_size=64, rope_parameters=DEFAULT, tie_word_embeddings=False)
    wide = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 20)
    sizes: dict[str, Any] = SIZES | wide | {"intermediate_size": 128, "image_size": 8, "patch_size": 2}
    tower = Llama4VisionConfig(**sizes, pixel_shuffle_ratio=0.5, rope_parameters=DEFAULT)
    return Llama4Config(text_config=text, vision_config=tower, image_token_index=PLACE, tie_word_embeddings=False)


def _kimi_k25(**ends: Any) -> Kimi_K25Config:  # noqa: ANN401
    own: dict[str, Any] = TEXT | {"num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 12}
    own |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    own |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 20}
    text = DeepseekV3Config(**own, **ends, rope_parameters=DEFAULT, tie_word_embeddings=False)
    sides = dict.fromkeys(("pos_emb_height", "pos_emb_width"), 5)
    tower = Kimi_K25VisionConfig(**SIZES, **sides, patch_size=4, merge_kernel_size=[2, 2], rope_parameters=AXIAL)
    whole: dict[str, Any] = {"projection_hidden_size": 32, "image_token_id": PLACE, "tie_word_embeddings": False}
    return Kimi_K25Config(text_config=text, vision_config=tower, **whole)


def _minimax_m3_vl(**ends: Any) -> MiniMaxM3VLConfig:  # noqa: ANN401
    own: dict[str, Any] = TEXT | {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "rotary_dim": 16}
    own |= {"dense_intermediate_size": 20, "shared_intermediate_size": 20, "index_n_heads": 1, "index_head_dim": 16}
    own |= {"index_block_size": 8, "index_topk_blocks": 64, "mlp_layer_types": ["dense", "sparse"]}
    rope = DEFAULT | {"partial_rotary_factor": 1.0}
    kinds = ["full_attention", "minimax_m3_sparse"]
    text = MiniMaxM3VLTextConfig(**own, **ends, layer_types=kinds, rope_parameters=rope, tie_word_embeddings=False)
    sizes: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    tower = MiniMaxM3VLVisionConfig(**SIZES, **sizes, rope_parameters=AXIAL)
    whole: dict[str, Any] = {"projector_hidden_size": 20, "image_token_index": PLACE, "video_token_index": PLACE + 1}
    return MiniMaxM3VLConfig(text_config=text, vision_config=tower, **whole, tie_word_embeddings=False)


def _gemma4(**ends: Any) -> Gemma4Config:  # noqa: ANN401
    own: dict[str, Any] = TEXT | {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 4}
    own |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    own |= {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": ends["vocab_size"]}
    sizes: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 40}
    tower = Gemma4VisionConfig(**sizes, patch_size=4, pooling_kernel_size=2, standardize=True)
    return Gemma4Config(text_config=Gemma4TextConfig(**own, **ends), vision_config=tower, image_token_id=PLACE)


def _step3p7(**ends: Any) -> Step3p7Config:  # noqa: ANN401
    own: dict[str, Any] = TEXT | {"head_dim": 16, "num_sliding_attention_heads": 3, "sliding_window": 16}
    own |= {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
    own |= {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "share_expert_dim": 20}
    own |= {"rope_parameters": dict.fromkeys(own["layer_types"], DEFAULT | {"partial_rotary_factor": 1.0})}
    sizes: dict[str, Any] = SIZES | {"image_size": 32, "patch_size": 4, "rope_parameters": AXIAL}
    return Step3p7Config(text_config=own | ends, vision_config=sizes, image_token_id=PLACE)


CONFIGS: dict[str, Callable[..., Any]] = {
    "step3p7": _step3p7,
    "internvl": _internvl,
    "llama4": _llama4,
    "kimi_k25": _kimi_k25,
    "minimax_m3_vl": _minimax_m3_vl,
    "gemma4": _gemma4,
}
TILE = {"height": 8, "width": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "step3p7": {
        "image_processor_type": "Step3p7ImageProcessor",
        "size": {"height": 32, "width": 32},
        "patch_size": 16,
        "vision_patch_size": 4,
    },
    "internvl": {"image_processor_type": "GotOcr2ImageProcessor", "size": TILE, "max_patches": 4},
    "llama4": {"image_processor_type": "Llama4ImageProcessor", "size": TILE, "max_patches": 4},
    "kimi_k25": {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "max_patches": 30},
    "minimax_m3_vl": {
        "image_processor_type": "MiniMaxM3VLImageProcessor",
        "patch_size": 4,
        "size": {"shortest_edge": 200, "longest_edge": 600},
    },
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
}
OUTER = {"image_seq_length": 4, "patch_size": 2, "pixel_shuffle_ratio": 0.5}


def _pictures(folder: Path) -> list[Path]:
    files = []
    for i, size in enumerate(((20, 31), (40, 14))):
        numbers = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(numbers).save(folder / f"{i}.png")
        files.append(folder / f"{i}.png")
    return files


def _folder(family: str, folder: Path) -> tuple[Any, int]:
    """Writes a random model and its processor; returns transformers' model, and the end token."""
    folder.mkdir()
    _, end = write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    n_vocab = tokenizer.get_vocab_size()
    config = CONFIGS[family](vocab_size=n_vocab, eos_token_id=end, pad_token_id=0, bos_token_id=1)
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[family]))
    (folder / "processor_config.json").write_text(json.dumps(OUTER))
    return model.eval(), end


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = open_model(folder).tokenizer()
    assert tokenizer is not None
    return tokenizer


def _seen(found: Patches | Pieces, tokenizer: Tokenizer) -> list[int]:
    """What stands for all pictures."""
    said = [one for text in found.texts for one in text]
    return [
        token
        for one in said
        for token in ([PLACE] * one if isinstance(one, int) else tokenizer.encode(one, special=True))
    ]


def _given(found: Patches | Pieces, family: str) -> dict[str, Any]:
    """What their model takes of images."""
    if family == "step3p7":
        return _views(found)
    if isinstance(found, Pieces):
        return {"pixel_values": found.values}
    values, grids = found.values, torch.tensor(found.grids)
    if family in ("kimi_k25", "gemma4"):
        each = zip(values.split(grids.prod(1).tolist()), found.grids, strict=True)
        rows = [row_by_row(x[None], (h, w), 2)[0].unflatten(1, (3, 4, 4)) for x, (_, h, w) in each]
        if family == "gemma4":
            flat = [x.permute(0, 2, 3, 1).flatten(1) for x in rows]
            places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1) for _, h, w in found.grids]
            return {
                "pixel_values": pad_sequence(flat, batch_first=True),
                "image_position_ids": pad_sequence(places, batch_first=True, padding_value=-1),
            }
        values = torch.cat(rows)
    return {"pixel_values": values, "image_grid_thw": grids}


def _views(found: Patches | Pieces) -> dict[str, Any]:
    """The pixels of pictures as a whole, and of their tiles, of which there are two and three."""
    assert isinstance(found, Patches)
    each = found.values.split([rows * columns for _, rows, columns in found.grids])
    sides = [4 * rows for _, rows, _ in found.grids]
    assert sides == [16, 16, 32, 16, 16, 16, 32]
    views = [fold(x.T[None], side, 4, stride=4) for x, side in zip(each, sides, strict=True)]
    whole, tiles = (torch.cat([x for x in views if x.shape[2] == side]) for side in (32, 16))
    return {"pixel_values": whole, "pixel_values_local": tiles, "num_local_patches": torch.tensor([2, 3])}


@pytest.mark.parametrize("family", CONFIGS)
def test_pictures_give_the_tokens_that_transformers_gives(run: Run, family: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model, end = _folder(family, folder)
    files, tokenizer = _pictures(tmp_path), _tokenizer(folder)
    found = Preparation.read(folder).of(files)
    assert isinstance(found, Patches | Pieces)
    assert len(found) > 3 or family in ("kimi_k25", "minimax_m3_vl", "gemma4")
    ids, wrapped = tokenizer.encode(PROMPT), tokenizer.encode(PROMPT, wrap=True)
    after = wrapped.index(ids[0])
    prompt = torch.tensor([[*wrapped[:after], *_seen(found, tokenizer), *wrapped[after:]]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": NEW}
    if family == "gemma4":  # the tokens of an image attend to each other
        options["mm_token_type_ids"] = (prompt == PLACE).long()
    want = model.generate(prompt, **options, **_given(found, family))[0, prompt.shape[1] :].tolist()
    said = run("generate", folder, PROMPT, *(word for file in files for word in ("--image", file)), "--json", "-n", NEW)
    assert said.exit_code == 0, said.output
    tokens = json.loads(said.stdout)["tokens"]
    assert tokens == want[: len(tokens)]
    assert len(tokens) == NEW or tokens[-1] == end
    placed = [*wrapped[:after], PLACE, PLACE, *wrapped[after:]]
    assert asbuilt.generate(str(folder), placed, images=files, max_new_tokens=NEW) == tokens
    if isinstance(found, Pieces) and found.mark is not None:
        mark = tokenizer.encode(found.mark, special=True)
        marked = [*wrapped[:after], *mark, *mark, *wrapped[after:]]
        assert asbuilt.generate(str(folder), marked, images=files, max_new_tokens=NEW) == tokens
        with pytest.raises(asbuilt.InputError, match="wrong number of image placeholders"):
            asbuilt.generate(str(folder), marked, images=files[:1], max_new_tokens=NEW)


def test_pixels_of_whole_squares_are_read_without_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    _folder("gemma4", folder)
    numbers = np.random.default_rng().integers(0, 256, (2, 56, 80, 3), dtype=np.uint8)  # 7 x 10 squares, all of them
    found = Preparation.read(folder).of([Image.fromarray(one) for one in numbers])
    pixels = torch.from_numpy(numbers).permute(0, 3, 1, 2) / 255
    prompt = [1, *[PLACE] * 70, 9, *[PLACE] * 70, 10]
    want, have = (asbuilt.generate(str(folder), prompt, images=x, max_new_tokens=NEW) for x in (found, pixels))
    assert have == want
    assert have == asbuilt.generate(str(folder), [1, PLACE, 9, PLACE, 10], images=pixels, max_new_tokens=NEW)
    with pytest.raises(asbuilt.InputError, match="wrong image size"):
        asbuilt.generate(str(folder), [1, PLACE, 9], images=pixels[:1, :, :, :77], max_new_tokens=NEW)


def test_one_view_of_each_picture_is_read_as_pixels(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    _folder("step3p7", folder)
    found = Preparation.read(folder).of(_pictures(tmp_path))
    assert isinstance(found, Patches)
    views = _views(found)
    whole, tiles = views["pixel_values"], views["pixel_values_local"][:2]
    for pixels, n in ((whole, 4), (tiles, 1)):
        side = pixels.shape[2] // 4
        patches = Patches(torch.cat([unfold(x[None], 4, stride=4)[0].T for x in pixels]), ((1, side, side),) * 2)
        prompts = [1, PLACE, 9, PLACE, 10], [1, *[PLACE] * n, 9, *[PLACE] * n, 10]
        given = [(prompt, images) for prompt in prompts for images in (pixels, patches)]
        one, *others = (asbuilt.generate(str(folder), ids, images=x, max_new_tokens=NEW) for ids, x in given)
        assert others == [one] * 3
    with pytest.raises(asbuilt.InputError, match="wrong image size"):
        asbuilt.generate(str(folder), [1, PLACE, 9], images=whole[:1, :, :, :30], max_new_tokens=NEW)


TEMPLATE = (
    "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}{% for part in one.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_a_chat_has_pictures_where_its_template_writes_the_mark(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    _folder("llama4", folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": TEMPLATE}))
    files = _pictures(tmp_path)
    chat, _ = open_chat(open_model(folder), context=400, max_new_tokens=NEW)
    answer = "".join(chat.send(PROMPT, images=files))
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": PROMPT}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    assert asbuilt.generate(str(folder), messages, images=files, max_new_tokens=NEW) == answer
    assert chat.left < 300  # the tokens of both pictures are in the cache


def test_what_does_not_fit_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    _folder("llama4", folder)
    files = _pictures(tmp_path)
    with pytest.raises(asbuilt.InputError, match="wrong number of image placeholders"):
        asbuilt.generate(str(folder), [PLACE, 9, 10], images=files, max_new_tokens=NEW)
    (folder / "processor_config.json").write_text(json.dumps(OUTER | {"patch_size": 1}))
    said = run("generate", folder, PROMPT, "--image", files[0])
    assert said.exit_code == 2
    assert "other tokens" in said.output
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS["llama4"] | {"max_patches": 0}))
    said = run("generate", folder, PROMPT, "--image", files[0])
    assert (said.exit_code, "max_patches" in said.output) == (2, True)
    files[0].write_text("no picture")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS["llama4"]))
    said = run("generate", folder, PROMPT, "--image", files[0])
    assert (said.exit_code, "image" in said.output) == (2, True)
