"""Hub ids, against a stand-in hub on this machine: what is fetched, what is not, and what is said where it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
import tiny
import torch
from huggingface_hub import constants

from asbuilt.checkpoint import hub as fetching
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError

NEVER = {
    "pytorch_model.bin": b"pickle",
    "modeling_mine.py": b"raise SystemExit",
    "model.onnx": b"1",
    "data/train.json": b"[]",
    "other.safetensors": b"1",
    "README.md": b"# mine",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub with org/mine, whole, and org/shards; its cache is empty."""
    with hub_server.served() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        for name in ("mine", "shards"):
            tiny.write(tmp_path / name, "llama", 6, shards=name == "shards")
            files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
            files["1_Pooling/config.json"] = b"{}"
            served.repos[f"org/{name}"] = {"main": files | NEVER, "v1": files | {"generation_config.json": b"{}"}}
        yield served


def test_descriptions_first_and_weights_where_they_are_wanted(hub: hub_server.Hub, tmp_path: Path) -> None:
    source = open_model("org/mine")
    assert (source.name, source.has_weights) == ("org/mine", False)
    assert hub.fetched == {"config.json", "generation_config.json", "1_Pooling/config.json"}
    model = load("org/mine")
    assert hub.fetched == {"config.json", "generation_config.json", "1_Pooling/config.json", tiny.SINGLE}
    want = load(tmp_path / "mine").state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
    hub.asked.clear()
    load("org/mine")
    assert hub.fetched == set(), "what is there is not fetched again"


def test_shards_are_those_of_the_index(hub: hub_server.Hub, tmp_path: Path) -> None:
    assert not open_model("org/shards").has_weights
    assert hub.fetched == {"config.json", "generation_config.json", "1_Pooling/config.json", tiny.INDEX}
    convert("org/shards", tmp_path / "out")
    shards = {path.name for path in (tmp_path / "shards").glob("*.safetensors")}
    assert len(shards) > 1
    assert hub.fetched == shards | {"config.json", "generation_config.json", "1_Pooling/config.json", tiny.INDEX}
    tiny.assert_same(tiny.stored(tmp_path / "out"), tiny.stored(tmp_path / "shards"))


def test_a_revision_and_an_offline_hub(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_model("org/mine").eos_ids == (1,)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_model("org/mine").spec.d_model == tiny.D_MODEL
    for name, said in (
        ("org/shards", "cannot be reached, and the model is not in the local cache .*connect"),
        ("org/mine@v1", "cannot be reached, and the model is not in the local cache"),
    ):
        with pytest.raises(InputError, match=said):
            open_model(name)
    with pytest.raises(InputError, match=r"cannot be reached, and model.safetensors is not in the local cache"):
        load("org/mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert load("org/mine@v1")
    assert any(path.endswith("/v1/config.json") or "revision/v1" in path for path in hub.asked)


def test_a_hub_that_does_not_answer(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    load("org/mine")
    hub.refused["org/mine"] = hub.refused["org/shards"] = (500, "")
    assert load("org/mine"), "what is in the cache is there"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert load("org/mine")
    with pytest.raises(InputError, match="the hub cannot be reached, and the model is not in the local cache"):
        load("org/shards")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (
            403,
            "GatedRepo",
            "access to this model must be requested .*request it at http.*/org/mine, then set HF_TOKEN",
        ),
        (401, "RepoNotFound", "the hub has no such model, or it is private .*set HF_TOKEN"),
        (404, "RepoNotFound", "the hub has no such model"),
        (404, "RevisionNotFound", "no such revision"),
        (418, "", "download failed: .*418"),
    ],
)
def test_what_the_hub_refuses_is_said(hub: hub_server.Hub, status: int, code: str, said: str) -> None:
    hub.refused["org/mine"] = (status, code)
    with pytest.raises(InputError, match=said) as caught:
        open_model("org/mine")
    assert "\n" not in str(caught.value)


def test_only_pickles_and_no_weights_at_all(hub: hub_server.Hub) -> None:
    files = hub.repos["org/mine"]["main"]
    del files[tiny.SINGLE]
    with pytest.raises(InputError, match=r"can run arbitrary code.*pytorch_model.bin"):
        load("org/mine")
    del files["pytorch_model.bin"]
    with pytest.raises(InputError, match=r"the hub has neither model.safetensors nor"):
        load("org/mine")
    assert not hub.fetched & NEVER.keys()


def test_an_index_that_names_what_is_not_there_or_elsewhere(hub: hub_server.Hub) -> None:
    files = hub.repos["org/shards"]["main"]
    for shard, said in (
        ("gone.safetensors", "names gone.safetensors, which the hub does not have"),
        ("../a.safetensors", "shard name"),
    ):
        files[tiny.INDEX] = json.dumps({"weight_map": {"a": shard}}).encode()
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        with pytest.raises(InputError, match=said):
            load("org/shards")


def test_a_file_that_breaks_off_is_not_taken_for_whole(hub: hub_server.Hub) -> None:
    whole = hub.repos["org/mine"]["main"][tiny.SINGLE]
    hub.cut[tiny.SINGLE] = len(whole) // 2
    try:
        load("org/mine")  # the library tries again
    except InputError as error:
        assert "download failed" in str(error) or "is incomplete" in str(error)  # noqa: PT017
        assert not list(Path(constants.HF_HUB_CACHE).rglob(tiny.SINGLE))
        load("org/mine")
    hub.listed[tiny.SINGLE] = len(whole) + 1
    with pytest.raises(InputError, match=rf"the download of .* is incomplete .*{len(whole) + 1:,} bytes, and has"):
        load("org/mine")


def test_room_is_there_before_weights_are_fetched(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.listed[tiny.SINGLE] = 2**60
    with pytest.raises(InputError, match=rf"not enough disk space: {2**60:,} bytes are needed"):
        load("org/mine")
    assert tiny.SINGLE not in hub.fetched
    hub.listed["config.json"] = fetching.LARGEST + 1
    with pytest.raises(InputError, match=r"org/mine: config.json: too large for a config file"):
        open_model("org/mine")
