"""kimi_linear's dense layers under their published names, `mlp`; transformers saves them under `block_sparse_moe`."""

from __future__ import annotations

from pathlib import Path

from cases.kimi_linear import CASE, draw
from harness import asbuilt_loads, compare, transformers_loads, transformers_saves
from safetensors.torch import load_file, save_file

from asbuilt.families import tensor_table


def test_dense_layers_under_their_published_names(tmp_path: Path) -> None:
    rng = CASE.random("groups", "dense")
    config = draw(rng, mlp_layer_types=["dense", "sparse"])
    transformers_saves(config, rng.randrange(2**32), tmp_path, CASE.kind)
    (file,) = tmp_path.glob("*.safetensors")
    wrong, right = "layers.0.block_sparse_moe.", "layers.0.mlp."
    saved = load_file(file)
    assert any(wrong in name for name in saved)
    save_file({name.replace(wrong, right): x for name, x in saved.items()}, file, {"format": "pt"})
    mine, theirs = asbuilt_loads(tmp_path), transformers_loads(tmp_path, kind=CASE.kind)
    inputs = CASE.kind.inputs(rng, mine.spec)
    assert compare(CASE.kind.ours(mine, inputs), CASE.kind.theirs(theirs, inputs)).first is None
    names = [name for one in tensor_table("kimi_linear", mine.spec).entries for name in one.names]
    assert "model.layers.0.mlp.gate_proj.weight" in names
