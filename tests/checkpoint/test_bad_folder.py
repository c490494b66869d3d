"""Checkpoint folders that are wrong or hostile: one InputError that names the fault, before any weight is allocated."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import asbuilt.nn
from asbuilt.checkpoint import save as saving
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load, stored_parameters
from asbuilt.checkpoint.safetensors import Reader
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.formats.safetensors import read_folder, read_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    tiny.write(made, "llama", random.randrange(2**32))
    return made


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the test fail where a model is built before its checkpoint has been checked."""

    def build(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were allocated first")

    monkeypatch.setattr(asbuilt.nn, "build", build)


@pytest.mark.usefixtures("unbuilt")
class TestMismatch:
    def test_missing(self, folder: Path) -> None:
        tensors = tiny.stored(folder)
        gone = [name for name in tensors if ".1." in name]
        tiny.rewrite(folder, {name: tensor for name, tensor in tensors.items() if name not in gone})
        with pytest.raises(
            InputError, match=f"{len(gone)} missing: model.layers.1.*and {len(gone) - 5} more"
        ) as caught:
            load(folder)
        assert sum(name in str(caught.value) for name in gone) == 5

    def test_unexpected(self, folder: Path) -> None:
        tiny.rewrite(folder, tiny.stored(folder) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(18)})
        with pytest.raises(InputError, match=r"1 unexpected: .*q_proj.bias"):
            load(folder)

    def test_misshapen(self, folder: Path) -> None:
        tensors = tiny.stored(folder)
        name = "model.layers.0.mlp.up_proj.weight"
        tiny.rewrite(folder, tensors | {name: tensors[name].t().contiguous()})
        said = (
            rf"1 of another shape: {name} is \({tiny.D_MODEL}, {tiny.D_FF}\), expected \({tiny.D_FF}, {tiny.D_MODEL}\)"
        )
        with pytest.raises(InputError, match=said):
            load(folder)

    def test_a_shape_that_would_broadcast(self, folder: Path) -> None:
        tiny.rewrite(folder, tiny.stored(folder) | {"model.norm.weight": torch.ones(1)})
        with pytest.raises(InputError, match=r"model.norm.weight is \(1,\), expected \(12,\)"):
            load(folder)

    def test_integers(self, folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tiny.rewrite(folder, tiny.stored(folder) | {name: torch.zeros(tiny.D_FF, tiny.D_MODEL, dtype=torch.int8)})
        with pytest.raises(InputError, match=rf"1 of an unsupported type: {name} is I8"):
            load(folder)

    def test_all_at_once_and_in_convert(self, folder: Path) -> None:
        tensors = tiny.stored(folder)
        del tensors["model.norm.weight"]
        tiny.rewrite(folder, tensors | {"lm_head.weight": torch.zeros(2, 2), "extra": torch.zeros(1)})
        said = "1 missing: model.norm.weight; 1 unexpected: 'extra'; 1 of another shape: lm_head.weight"
        for refused in (lambda: load(folder), lambda: convert(folder, folder.with_name("out"))):
            with pytest.raises(InputError, match=said):
                refused()
        assert [path.name for path in folder.parent.iterdir()] == ["made"]

    def test_a_head_where_the_config_ties_it(self, folder: Path) -> None:
        tiny.edit_json(folder / "config.json", tie_word_embeddings=False)
        tensors = tiny.stored(folder)
        del tensors["lm_head.weight"]
        tiny.rewrite(folder, tensors)
        with pytest.raises(InputError, match=r"1 missing: lm_head.weight"):
            load(folder)

    def test_a_config_of_a_giant(self, folder: Path) -> None:
        tiny.edit_json(folder / "config.json", vocab_size=2**31 - 1, intermediate_size=2**31 - 1)
        with pytest.raises(InputError, match=r"8 of another shape: .*expected \(2147483647, 12\)"):
            load(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_head_stored_with_other_values_is_refused(tmp_path: Path, family: str) -> None:
    tiny.write(tmp_path / "made", family, 1, tied=True)
    tensors = tiny.stored(tmp_path / "made")
    other = next(tensor for name, tensor in tensors.items() if "embed_tokens" in name or "wte" in name).clone()
    other[-1, -1] += 1e-3
    tiny.rewrite(tmp_path / "made", tensors | {"lm_head.weight": other})
    for refused in (lambda: load(tmp_path / "made"), lambda: convert(tmp_path / "made", tmp_path / "out")):
        with pytest.raises(InputError, match=r"lm_head.weight is tied to embedding.weight.*tie_word_embeddings"):
            refused()


class TestPickle:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
    def test_is_refused_with_the_way_out(self, folder: Path, name: str) -> None:
        (folder / tiny.SINGLE).rename(folder / name)
        assert not open_model(folder).has_weights
        for model in (folder, folder / name):
            with pytest.raises(InputError, match=rf"can run arbitrary code.*{name}.*weights_only=True.*save_file"):
                load(model)

    def test_beside_safetensors_is_left_alone(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"never read")
        load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / tiny.SINGLE).unlink()
    with pytest.raises(InputError, match=r"no weights: neither model.safetensors nor"):
        load(folder)


class TestFile:
    """One safetensors file that lies about itself."""

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def test_cut_short_or_too_long(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        whole = save({"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)})
        n = data.draw(st.integers(0, len(whole) + 40).filter(lambda n: n != len(whole)))
        path = tmp_path_factory.getbasetemp() / "cut.safetensors"
        path.write_bytes((whole + bytes(40))[:n])
        with pytest.raises(InputError):
            read_header(path)

    @given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
    @settings(max_examples=300, deadline=None)
    def test_flipped_bytes_are_refused_or_read(
        self, tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
    ) -> None:
        whole = bytearray(save({"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, {"format": "pt"}))
        length = 8 + int.from_bytes(whole[:8], "little")
        for place, change in flips:
            whole[place % length] ^= change
        path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
        path.write_bytes(whole)
        try:
            tensors = read_header(path)
            read = {name: Reader(tensors)(name) for name in tensors}
        except InputError:
            return
        assert sum(tensor.nbytes for tensor in read.values()) == len(whole) - length

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            ({"a": ["F32", [2], [0, 8]], "b": ["F32", [2], [4, 12]]}, "overlaps"),
            ({"a": ["F32", [2], [0, 8]], "b": ["F32", [2], [12, 20]]}, "hole"),
            ({"a": ["F32", [2], [4, 12]]}, "hole"),
            ({"a": ["F32", [3], [0, 8]]}, "12 bytes apart"),
            ({"a": ["F32", [-2], [0, -8]]}, "whole numbers"),
            ({"a": ["F32", [2.0], [0, 8]]}, "whole numbers"),
            ({"a": ["F32", [True, 2], [0, 8]]}, "whole numbers"),
            ({"a": ["F32", [2**63, 2**63], [0, 8]]}, "whole numbers"),
            ({"a": ["F32", [2**62, 2**62], [0, 2**62]]}, "bytes apart"),
            ({"a": ["F32", [1] * 9, [0, 4]]}, "at most 8"),
            ({"a": ["F33", [2], [0, 8]]}, "dtype"),
            ({"a": [["F32"], [2], [0, 8]]}, "dtype"),
            ({"a": ["F32", [2**40], [0, 2**42]]}, "the file has"),
            ({"a": ["F4", [3], [0, 1]]}, "1.5 bytes"),
        ],
    )
    def test_contradictions(self, tmp_path: Path, header: dict[str, list[Any]], said: str) -> None:
        keys = ("dtype", "shape", "data_offsets")
        text = json.dumps({name: dict(zip(keys, values, strict=True)) for name, values in header.items()})
        self.refuse(tmp_path, text.encode(), said)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b"[]", "invalid header .*must be a JSON object"),
            (b'{"a": 1}', "invalid entry"),
            (b'{"a": {}}', "invalid entry"),
            (b"{" * 100_000, "not JSON"),
            (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
            (b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"more":1}}', "invalid entry"),
            (b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{}}', "duplicate key"),
            (b'{"__metadata__":{"format":1}}', "__metadata__"),
            (b'{"__metadata__":[]}', "__metadata__"),
            (b'{"\xff":{}}', "not UTF-8"),
            ("{}".encode("utf-16"), "not UTF-8"),
            (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "a number is too long"),
        ],
    )
    def test_headers_that_are_none(self, tmp_path: Path, text: bytes, said: str) -> None:
        self.refuse(tmp_path, text, said)

    @pytest.mark.parametrize("length", [0, 1, 2**23 + 1, 2**32, 2**63, 2**64 - 1])
    def test_lengths(self, tmp_path: Path, length: int) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + b"{}" * 20)
        with pytest.raises(InputError, match="header length"):
            read_header(path)

    def refuse(self, folder: Path, text: bytes, said: str) -> None:
        path = folder / "a.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(InputError, match=said):
            read_header(path)

    def test_changed_after_its_header_was_read(self, folder: Path) -> None:
        tensors = read_folder(folder)
        tiny.rewrite(folder, {name: torch.zeros(1) for name in tensors})
        with pytest.raises(InputError, match="has changed"):
            Reader(tensors)("model.norm.weight")
        (folder / tiny.SINGLE).write_bytes(b"short")
        with pytest.raises(InputError, match="cannot be read"):
            Reader(tensors)("model.norm.weight")


class TestIndex:
    """An index and shards that do not fit."""

    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        tiny.write(tmp_path / "sharded", "llama", 2, shards=True)
        return tmp_path / "sharded"

    @pytest.mark.parametrize(
        "shard",
        ["../{}", "/tmp/{}", "sub/{}", "..\\{}", "C:{}", "\0{}", "", "..", "config.json", 3, None, ["{}"], "{}.bin"],
    )
    def test_a_shard_name_that_leaves_the_folder(self, sharded: Path, shard: object) -> None:
        file = sharded / next(iter(read_folder(sharded).values())).path.name
        (sharded.parent / file.name).write_bytes(file.read_bytes())
        weight_map = json.loads((sharded / tiny.INDEX).read_text())["weight_map"]
        weight_map["model.norm.weight"] = shard.format(file.name) if isinstance(shard, str) else shard
        tiny.edit_json(sharded / tiny.INDEX, weight_map=weight_map)
        with pytest.raises(InputError, match="shard name"):
            stored_parameters(sharded)

    @pytest.mark.parametrize("weight_map", [None, {}, [], "model"])
    def test_no_map(self, sharded: Path, weight_map: object) -> None:
        tiny.edit_json(sharded / tiny.INDEX, weight_map=weight_map)
        with pytest.raises(InputError, match="weight_map"):
            load(sharded)

    def test_a_shard_that_is_missing(self, sharded: Path) -> None:
        next(sharded.glob("*.safetensors")).unlink()
        with pytest.raises(InputError, match=r"-of-.*cannot be read"):
            load(sharded)

    def test_a_name_that_no_shard_has(self, sharded: Path) -> None:
        weight_map = json.loads((sharded / tiny.INDEX).read_text())["weight_map"]
        tiny.edit_json(sharded / tiny.INDEX, weight_map=weight_map | {"ghost": weight_map["model.norm.weight"]})
        with pytest.raises(InputError, match="names 'ghost', but the shard does not have it"):
            load(sharded)

    def test_a_name_in_another_shard_than_the_index_says(self, sharded: Path) -> None:
        weight_map = json.loads((sharded / tiny.INDEX).read_text())["weight_map"]
        other = next(shard for shard in weight_map.values() if shard != weight_map["model.norm.weight"])
        tiny.edit_json(sharded / tiny.INDEX, weight_map=weight_map | {"model.norm.weight": other})
        with pytest.raises(
            InputError, match=rf"names 'model.norm.weight', but the shard does not have it \(got '{other}'\)"
        ):
            load(sharded)

    @pytest.mark.parametrize("place", ["shard", "index", "config.json"])
    def test_a_pipe_or_device_in_place_of_a_file(self, sharded: Path, place: str) -> None:
        name = {"shard": next(sharded.glob("*.safetensors")).name, "index": tiny.INDEX}.get(place, place)
        (sharded / name).unlink()
        os.mkfifo(sharded / name)
        out = sharded.with_name("out")
        refused = f"{name}: (a pipe, a socket or a device, )?(is a folder|is a pipe|must be a regular file)"
        for act in (load, stored_parameters, lambda folder: convert(folder, out)):
            with pytest.raises(InputError, match=refused):
                act(sharded)
        (sharded / name).unlink()
        (sharded / name).symlink_to("/dev/zero")
        with pytest.raises(InputError, match=refused):
            load(sharded)
        assert [path.name for path in sharded.parent.iterdir()] == ["sharded"]

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        names = sorted(path.name for path in sharded.glob("*.safetensors"))
        (sharded / names[0]).write_bytes((sharded / names[1]).read_bytes())
        with pytest.raises(InputError, match="stored twice"):
            load(sharded)


class TestTarget:
    """Where a folder may be written, and that nothing is left where it may not."""

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_what_exists_is_not_touched(self, folder: Path, kind: str) -> None:
        out = folder.with_name("out")
        if kind == "link":
            out.symlink_to(folder.with_name("nowhere"))
        elif kind == "file":
            out.write_text("mine")
        else:
            out.mkdir()
            (out / "mine").write_text("mine")
        with pytest.raises(InputError, match="already exists"):
            convert(folder, out)
        kept = out.read_text() if kind == "file" else [path.name for path in out.glob("*")]
        assert kept == {"folder": ["mine"], "file": "mine", "link": []}[kind]
        assert sorted(path.name for path in folder.parent.iterdir()) == ["made", "out"]

    def test_an_empty_folder_and_missing_parents_are_used(self, folder: Path) -> None:
        folder.with_name("empty").mkdir()
        for out in (folder.with_name("empty"), folder.with_name("a") / "b" / "c"):
            convert(folder, out)
            tiny.assert_same(tiny.stored(out), tiny.stored(folder))
            assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []

    def test_parents_made_for_a_failure_are_removed(self, folder: Path) -> None:
        with pytest.raises(KeyError):
            convert(folder, folder.with_name("a") / "b" / "c", progress=lambda done, total: {}[done])
        assert [path.name for path in folder.parent.iterdir()] == ["made"]

    def test_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(saving, "ROOM", 2**62)
        with pytest.raises(InputError, match="not enough disk space"):
            convert(folder, folder.with_name("out"))
        assert [path.name for path in folder.parent.iterdir()] == ["made"]

    def test_a_write_that_fails(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saving, "_write_tensor", fail)
        with pytest.raises(InputError, match=r"cannot be written: No space left"):
            convert(folder, folder.with_name("out"))
        assert [path.name for path in folder.parent.iterdir()] == ["made"]

    def test_a_family_that_cannot_express_the_model(self, folder: Path) -> None:
        with pytest.raises(InputError, match="gpt2"):
            saving.save(load(folder), folder.with_name("out"), family="gpt2", carried={})
        assert [path.name for path in folder.parent.iterdir()] == ["made"]

    @pytest.mark.parametrize("most", [0, -1, float("nan")])
    def test_a_shard_size_that_is_none(self, folder: Path, most: float) -> None:
        with pytest.raises(InputError, match="max_shard_bytes"):
            convert(folder, folder.with_name("out"), max_shard_bytes=most)
