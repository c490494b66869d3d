"""What MODEL may be: each kind is found, and what is none of them is refused with what was meant."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import tiny
import torch

from asbuilt import catalog
from asbuilt.checkpoint import hub
from asbuilt.checkpoint.load import load, stored_parameters
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.spec import dumps, to_dict


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in what is made the current folder."""
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path / "mine", "llama", random.randrange(2**32))
    return tmp_path / "mine"


@pytest.mark.parametrize("name", catalog.names())
def test_a_catalogue_name_describes_and_does_not_load(name: str) -> None:
    source = open_model(name)
    row = catalog.find(name)
    assert (source.kind, source.name, source.path, source.family) == ("catalogue", name, None, row.family)
    assert source.spec == row.spec()
    assert source.reading.dtype == row.dtype
    assert not source.has_weights
    assert source.tokenizer() is None
    assert source.chat_template is None
    for refused in (load, stored_parameters):
        with pytest.raises(InputError, match=f"no weights.*{name}.*give a checkpoint folder or a .gguf file"):
            refused(source)


@pytest.mark.parametrize("model", ["mine", "./mine", "mine/"])
def test_a_folder(folder: Path, model: str) -> None:
    for source in (open_model(model), open_model(Path(model))):
        assert (source.kind, source.name, source.family, source.has_weights) == ("folder", "mine", "llama", True)
        assert source.spec.d_model == tiny.D_MODEL
        assert source.tokenizer() is None


def test_a_folder_whose_name_is_in_the_catalogue(folder: Path) -> None:
    name = catalog.names()[0]
    Path(name).mkdir()
    assert open_model(name).kind == "catalogue"
    (folder / "config.json").rename(Path(name, "config.json"))
    assert open_model(name).kind == "folder"
    assert not open_model(name).has_weights


def test_a_config_wherever_it_lies(folder: Path) -> None:
    (folder / "config.json").rename("other.json")
    assert (open_model("other.json").kind, open_model("other.json").name) == ("config", "other")
    Path("other.json").rename(folder / "config.json")
    source = open_model(folder / "config.json")
    assert (source.kind, source.name, source.has_weights) == ("config", "mine", False)
    assert source.spec == open_model(folder).spec
    with pytest.raises(InputError, match=r"a config is a description and has no weights"):
        load(source)


def test_a_spec_of_our_own(folder: Path) -> None:
    spec = open_model(folder).spec
    Path("own.json").write_text(dumps(spec))
    source = open_model("own.json")
    assert (source.kind, source.family, source.spec) == ("spec", "llama", spec)
    with pytest.raises(InputError, match="a spec is a description and has no weights"):
        load(source)
    Path("part.json").write_text(dumps(spec.blocks[0]))
    with pytest.raises(InputError, match=r"part: must be LanguageModel, TextEncoder, .*, got 'Block'"):
        open_model("part.json")
    Path("wrong.json").write_text(json.dumps(to_dict(spec) | {"maximum": 3}))
    with pytest.raises(InputError, match=r"wrong.json.maximum: unknown field of LanguageModel"):
        open_model("wrong.json")


def test_tokenizer_and_template_of_a_folder(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    source = open_model(folder)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ba") == [1, 0]
    assert source.tokenizer() is tokenizer
    assert source.chat_template == "{{ x }}"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer"):
        open_model(folder).tokenizer()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[]", "must be a JSON object"),
        ("a.json", "{}", "model_type: missing"),
        ("a.json", '{"part": 3}', 'must be an object with a "part" key'),
        ("a.gguf", "none", "a.gguf: not a GGUF file|a.gguf: magic"),
        ("a.safetensors", "", "give the folder"),
        ("a.pt", "", "can run arbitrary code"),
        ("a.txt", "", "must be a .json or .gguf file, or a folder"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=said):
        open_model(tmp_path / name)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder has no config.json"):
        open_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InputError, match=r"give the file: .*a\.gguf"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["lama-3-8b", "org/lama-3-8b", "", "x" * 5000, "a\0b", "../nothing", "/nothing", "~"])
def test_unknown_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError) as caught:
        open_model(name)
    assert ("did you mean 'llama-3-8b'" in str(caught.value)) == ("lama" in name)


def test_hub_ids_come_before_the_catalogue_only_for_weights(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def fetch(name: str, *, weights: bool) -> Path:
        asked.append((name, weights))
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    assert open_model("openai-community/gpt2").kind == "catalogue"
    assert asked == []
    source = open_model("openai-community/gpt2", weights=True)
    assert (source.kind, source.name, source.path, source.family) == (
        "folder",
        "openai-community/gpt2",
        folder,
        "llama",
    )
    load("org/mine-7b@v1.0")
    assert open_model("org/mine").kind == "folder"
    assert asked == [("openai-community/gpt2", True), ("org/mine-7b@v1.0", True), ("org/mine", False)]


@pytest.mark.parametrize("name", ["org/a/b", "../a", "/a/b", "org/", "a b/c", "https://hub/a", "org/a@", "org/a@../b"])
def test_what_is_no_id_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", None)
    with pytest.raises(InputError, match="no such model"):
        open_model(name)


def test_without_the_library_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    with pytest.raises(InputError, match=r"needs huggingface_hub \(got 'org/lama-3-8b'\); pip install huggingface_hub"):
        open_model("org/lama-3-8b")
    assert open_model("openai-community/gpt2").kind == "catalogue"
    with pytest.raises(InputError, match="pip install huggingface_hub; gpt2 in the catalogue describes it"):
        open_model("openai-community/gpt2", weights=True)


def test_a_gguf_of_more_blocks_than_tensors(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(3)
    for i in range(2):
        writer.add_tensor(f"blk.{i}.attn_q.weight", torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"a.gguf: llama.block_count: more blocks .*got 3.*must be at most 2"):
        open_model(tmp_path / "a.gguf")


def test_what_stands_beside_a_config_is_read_with_its_folder(folder: Path) -> None:
    """Generation settings of the folder alone; what packs the weights only beside a file that is called config.json."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model(folder).eos_ids == (7, 9, 1)
    assert open_model(folder / "config.json").eos_ids == (1,)
    packed = {"quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(packed))
    (folder / "another.json").write_bytes((folder / "config.json").read_bytes())
    wanted = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert open_model(folder).reading.quantization == wanted
    assert open_model(folder / "config.json").reading.quantization == wanted
    assert open_model(folder / "another.json").reading.quantization is None
