"""Our own form of a folder: any model there is a spec for is saved and loaded again, without a published family."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import strategies
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import asbuilt
from asbuilt.checkpoint import save as saving
from asbuilt.checkpoint.own import OWN
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.nn import stored_tensors
from asbuilt.spec import MLP, Model, stored_weights, to_dict

SPECS = st.one_of(
    strategies.specs(),
    strategies.translators(),
    strategies.encoders(),
    strategies.towers(),
    strategies.seers(),
    strategies.sensers(),
)
DTYPES = st.sampled_from(["fp32", "bf16", "fp16"])


def own_spec() -> Model:
    """What no published family says: windows of a block each, and a plain feed-forward part in one of them."""
    spec = asbuilt.decoder(d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, n_vocab=50, max_positions=64, name="own")
    spec = spec.edit("blocks.0.attention.body", window=3).edit("blocks.1.attention.body", window=5, sinks=True)
    return spec.edit("blocks.2.ffn", body=MLP(d_model=32, d_ff=48, activation="relu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = asbuilt.build(own_spec(), seed=random.randrange(2**32))
    asbuilt.save(made, tmp_path / "own", carried={"eos_token_id": 7})
    return tmp_path / "own"


@settings(max_examples=20)
@given(spec=SPECS, dtype=DTYPES, seed=st.integers(0, 2**32 - 1))
def test_what_is_loaded_is_what_was_saved(spec: Model, dtype: str, seed: int) -> None:
    """Bit for bit, buffers too, under the spec's own paths, in the dtype of each."""
    made = strategies.randomised(
        spec, seed, dtype=getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, "float16"))
    )
    with TemporaryDirectory() as place:
        asbuilt.save(made, Path(place) / "m")
        stored = load_file(Path(place) / "m" / "model.safetensors")
        source = open_model(Path(place) / "m")
        loaded = asbuilt.load(source)
    assert {*stored} == {path for path, _, _ in stored_weights(spec)}
    assert loaded.spec == spec
    assert (source.kind, source.own) == ("folder", True)
    wanted = stored_tensors(made)
    for path, tensor in stored_tensors(loaded).items():
        assert tensor.dtype == wanted[path].dtype
        assert torch.equal(tensor, wanted[path])
        assert torch.equal(stored[path], wanted[path])


def test_every_command_takes_such_a_folder(folder: Path) -> None:
    """No family can express this one, and none is needed."""
    assert open_model(folder).family == ""

    def run(*words: object) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*map(str, words), "--json"])
        assert result.exit_code in (0, 1), result.output
        return json.loads(result.stdout)

    described = run("describe", folder)
    plain = asbuilt.describe(own_spec()).document()
    assert described["stored_bytes"] == 4 * described["parameters_stored"] == 4 * plain["parameters"]["total"]
    assert described | {"stored_bytes": None} == json.loads(json.dumps(plain))
    assert run("describe", folder / OWN) == json.loads(json.dumps(plain | {"name": "asbuilt"})) | {"name": "own"}
    assert run("diff", folder, folder)["same"] is True
    assert run("plan", "serve", folder, "--gpu", "h100-sxm")["fits"] is True
    assert run("plan", "train", folder, "--gpu", "h100-sxm")["fits"] is True
    loaded = asbuilt.load(folder)
    assert asbuilt.generate(folder, [1, 2, 3], max_new_tokens=1) == [
        int(loaded(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    ]
    assert open_model(folder).eos_ids == (7,)


def test_it_is_converted_to_another_dtype_and_to_a_family_that_can_say_it(folder: Path, tmp_path: Path) -> None:
    asbuilt.convert(folder, tmp_path / "half", dtype="bf16")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert open_model(tmp_path / "half").own
    spec = asbuilt.decoder(d_model=32, n_layers=2, n_heads=4, n_vocab=50)
    made = asbuilt.build(spec)
    asbuilt.save(made, tmp_path / "plain")
    asbuilt.convert(tmp_path / "plain", tmp_path / "published")
    source = open_model(tmp_path / "published")
    assert (source.own, source.family, source.spec.edit("", name="decoder")) == (False, "llama", spec)
    assert asbuilt.diff(tmp_path / "plain", source).same


def test_it_is_cut_into_shards(tmp_path: Path) -> None:
    made = asbuilt.build(own_spec())
    asbuilt.save(made, tmp_path / "cut", max_shard_bytes=5000, dtype=torch.bfloat16)
    assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 2
    loaded = asbuilt.load(tmp_path / "cut", "fp32")
    for path, tensor in stored_tensors(loaded).items():
        assert torch.equal(tensor, stored_tensors(made)[path].bfloat16().float())


def test_what_fails_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = asbuilt.load(folder)
    with pytest.raises(InputError, match="already exists"):
        asbuilt.save(made, folder)
    written = saving._write_tensor
    calls = iter(range(100))

    def fail(*args: Any) -> None:  # noqa: ANN401
        if next(calls) == 5:
            raise KeyboardInterrupt
        written(*args)

    monkeypatch.setattr(saving, "_write_tensor", fail)
    with pytest.raises(KeyboardInterrupt):
        asbuilt.save(made, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def changed(folder: Path, **more: Any) -> None:  # noqa: ANN401
    said = json.loads((folder / OWN).read_text()) | more
    (folder / OWN).write_text(json.dumps({key: value for key, value in said.items() if value != "absent"}))


BLOCK = to_dict(own_spec().blocks[0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"asbuilt": 2}, r"asbuilt: unknown version \(got 2; must be 1\); a newer asbuilt may read it"),
        ({"asbuilt": True}, "asbuilt: unknown version"),
        ({"asbuilt": "absent"}, "asbuilt: unknown version"),
        ({"modle": {}}, r"modle: unknown key.*'model'"),
        ({"model": "absent"}, 'model: must be an object with a "part" key'),
        ({"model": {"part": "RMSNorm", "d": 3}}, "model.part: must be LanguageModel"),
        ({"model": {"part": "Modell"}}, "model: unknown part"),
        ({"model": to_dict(own_spec()) | {"blocks": [{"repeat": 10**9, "item": BLOCK}]}}, "blocks.0: invalid repeat"),
        ({"model": to_dict(own_spec()) | {"blocks": [{"repeat": 2000, "item": BLOCK}]}}, "Model.blocks: "),
        ({"model": to_dict(own_spec()) | {"max_positions": -1}}, "Model.max_positions"),
        ({"dtype": 3}, "dtype: must be"),
        ({"carried": []}, "carried: must be a JSON object"),
        ({"carried": {"eos_token_id": "x"}}, "eos_token_id: must be a whole number"),
    ],
)
def test_a_stranger_s_description_is_refused_by_name(folder: Path, more: dict[str, Any], said: str) -> None:
    changed(folder, **more)
    with pytest.raises(InputError, match=said):
        open_model(folder).eos_ids  # noqa: B018


@pytest.mark.parametrize(
    "text", ["", "[]", "nul", "{" * 100, '{"asbuilt": 1, "asbuilt": 1}', '{"asbuilt": 1e999}', "\xff"]
)
def test_what_is_no_description(folder: Path, text: str) -> None:
    (folder / OWN).write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError):
        open_model(folder)
    with pytest.raises(InputError):
        open_model(folder / OWN)


def test_tensors_that_are_not_those_of_the_description(folder: Path) -> None:
    """Missing, of another shape and unexpected ones are named before anything is built."""
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.0.ffn.body.up.weight"] = tensors["blocks.0.ffn.body.up.weight"][1:].clone()
    tensors["else"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        InputError, match=r"1 missing: norm.weight; 1 unexpected: 'else'; 1 of another shape: blocks.0.ffn"
    ):
        asbuilt.load(folder)
    with pytest.raises(InputError, match="allow-unread"):
        open_model(folder, allow_unread=["x"])
    changed(folder, dtype=None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError):
        asbuilt.load(folder)


def test_transformers_does_not_run_it(folder: Path) -> None:
    with pytest.raises(InputError, match="cannot be run by transformers"):
        asbuilt.diff(folder, transformers=True)
