"""Buffers go to disk and back as they are, whatever dtype the weights take: what they decide must not be rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import strategies
import torch
from safetensors.torch import load_file

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load, stored_parameters
from asbuilt.checkpoint.save import save
from asbuilt.families import read_config
from asbuilt.nn import build, initialise
from asbuilt.nn.model import Model
from asbuilt.spec import Model as Spec

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 3,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
}
PATH, NAME = "blocks.1.ffn.body.router.correction", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def spec() -> Spec:
    return read_config(CONFIG, "tiny").spec


def saved(spec: Spec, folder: Path, dtype: torch.dtype, save_as: str | None = None) -> Model:
    model = strategies.randomised(spec, 1, dtype)
    save(model, folder, family="glm4_moe", carried={}, dtype=save_as)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [None, "bfloat16"])
def test_load_save_and_convert_keep_them(spec: Spec, tmp_path: Path, dtype: torch.dtype, wanted: str | None) -> None:
    model = saved(spec, tmp_path / "saved", dtype, wanted)
    want = model.get_buffer(PATH)
    assert want.dtype == torch.float32
    convert(tmp_path / "saved", tmp_path / "converted", dtype=wanted)
    for folder in ("saved", "converted"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(stored[NAME], want)
        assert stored["lm_head.weight"].dtype == (dtype if wanted is None else torch.bfloat16)
        for as_dtype in (None, "bfloat16", "float32"):
            again = load(tmp_path / folder, dtype=as_dtype)
            assert torch.equal(again.get_buffer(PATH), want)
        assert stored_parameters(tmp_path / folder) == sum(p.numel() for p in model.parameters()) + want.numel()


def test_they_do_not_decide_the_dtype_of_the_weights(spec: Spec, tmp_path: Path) -> None:
    """Of a config that does not say it, the weights' own is taken."""
    saved(spec, tmp_path / "saved", torch.bfloat16)
    config = tmp_path / "saved" / "config.json"
    config.write_text(config.read_text().replace('"torch_dtype": "bfloat16"', '"torch_dtype": null'))
    assert {p.dtype for p in load(tmp_path / "saved").parameters()} == {torch.bfloat16}


def test_a_new_model_has_them_at_zero(spec: Spec) -> None:
    for model in (build(spec), build(spec, seed=None), strategies.randomised(spec, 1)):
        if bool(model.get_buffer(PATH).any()):
            initialise(model, 0)
        assert not bool(model.get_buffer(PATH).any())
