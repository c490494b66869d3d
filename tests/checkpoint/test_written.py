"""What is written beside the weights, and what is left where writing ends early: nothing, now or after the next run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from asbuilt.checkpoint import save as saving
from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import Place, save
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.formats.safetensors import read_header


@pytest.fixture
def made(tmp_path: Path) -> Path:
    tiny.write(tmp_path / "made", "llama", 5)
    return tmp_path / "made"


def only(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


STOP = "print(flush=True); time.sleep(60)"


def converting(folder: Path, out: Path, step: str) -> subprocess.Popen[str]:
    """Starts the command line in a process of its own, doing `step` where the first tensor is written; waits for it."""
    code = (
        "import sys, time; from asbuilt.__main__ import main; from asbuilt.cli import convert\n"
        f"def step(self, done, total): {step}\n"
        "convert.Bar.__call__ = step; sys.argv[0] = 'asbuilt'; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "convert", folder, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(made: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL)  # what is ignored here, children ignore too
    try:
        process = converting(made, made.with_name("out"), STOP)
        assert len(list(made.parent.iterdir())) == 2
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (128 + number, "")
    finally:
        signal.signal(number, before)
    assert only(made.parent, "made")


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_writes_is_not(made: Path) -> None:
    out = made.with_name("out")
    process = converting(made, out, STOP)
    (left,) = (path for path in made.parent.iterdir() if path != made)
    assert re.fullmatch(r"\.out\.[0-9a-f]{8}\.partial", left.name)
    convert(made, made.with_name("other"))
    convert(made, out)  # while the first is at work
    assert only(made.parent, "made", "other", "out", left.name)
    process.kill()
    process.communicate()
    shutil.rmtree(out)
    (made.parent / ".out.0123abcd.partial").symlink_to(made)  # not a folder of ours
    (made.parent / ".out.notes.partial").mkdir()
    convert(made, made.with_name("other2"))
    assert left.exists()  # it is out's
    convert(made, out)
    assert only(made.parent, "made", "other", "other2", "out", ".out.0123abcd.partial", ".out.notes.partial")
    assert tiny.stored(made).keys() == tiny.stored(out).keys()


def test_a_file_that_may_not_grow_so_large_is_one_message(made: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "from asbuilt.__main__ import main; sys.argv[0] = 'asbuilt'; main()"
    )
    out = made.with_name("out")
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", made, out], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"Error: {out}: cannot be written: File too large.*\n", done.stderr)
    assert only(made.parent, "made")


def test_tensors_are_cast_and_written_piece_by_piece(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK", 7)
    convert(made, made.with_name("out"), dtype="bfloat16")
    want = {name: tensor.bfloat16() for name, tensor in tiny.stored(made).items()}
    tiny.assert_same(tiny.stored(made.with_name("out")), want)


def test_a_lack_of_memory_names_the_tensor(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)"
    )

    def fail(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(saving, "_write_tensor", fail)
    with pytest.raises(InputError, match=r"weight'?: not enough memory, 17179869184 bytes more are needed"):
        convert(made, made.with_name("out"))
    said = "of another kind"
    with pytest.raises(RuntimeError, match="of another kind"):
        convert(made, made.with_name("out"))
    assert only(made.parent, "made")


def test_names_of_code_are_left_behind(made: Path) -> None:
    auto = {"AutoModelForCausalLM": "modeling_x.Model"}
    tiny.edit_json(made / "config.json", auto_map=auto, bos_token_id=7)
    settings = {"auto_map": {"AutoTokenizer": ["x.Tok", None]}, "add_bos_token": False, "extra": {"auto_map": auto}}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    (made / "modeling_x.py").write_text("raise SystemExit")
    out = made.with_name("out")
    convert(made, out)
    save(
        load(made),
        made.with_name("saved"),
        family="llama",
        carried=open_model(made).reading.carried,
        tokenizer_from=made,
    )
    for folder in (out, made.with_name("saved")):
        config = json.loads((folder / "config.json").read_text())
        assert ("auto_map" in config, config["bos_token_id"]) == (False, 7)
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {"add_bos_token": False, "extra": {}}
        assert not list(folder.glob("*.py"))


def test_tokenizer_files_are_carried_along_byte_by_byte(made: Path) -> None:
    names = [
        "tokenizer.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "chat_template.jinja",
        "tokenizer_config.json",
    ]
    for name in names:
        (made / name).write_bytes(b'{"a": 1}\r\n\xff' + name.encode())
    (made / "vocab.json").symlink_to("vocab.txt")  # within the folder
    (made / "notes.txt").write_text("not carried")
    convert(made, made.with_name("out"))
    for name in (*names, "vocab.json"):
        assert (made.with_name("out") / name).read_bytes() == (made / name).read_bytes()
    assert not (made.with_name("out") / "notes.txt").exists()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("link", r"made/vocab.txt: a link that leads out of the folder is not copied"),
        ("pipe", r"made/vocab.txt: is a pipe, a socket or a device"),
        ("folder", r"made/vocab.txt: is a folder"),
        ("sparse", r"made/vocab.txt: too large to be copied along \(got 200000000000;"),
    ],
)
def test_what_lies_in_place_of_a_tokenizer_file_is_named(made: Path, kind: str, said: str) -> None:
    path = made / "vocab.txt"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(200 * 10**9)
    with pytest.raises(InputError, match=said):
        convert(made, made.with_name("out"))
    assert only(made.parent, "made")


def test_a_disk_without_room_for_the_weights_and_the_files_beside_them(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "vocab.txt").write_bytes(bytes(1_000_000))
    beside = 1_000_000 + (made / "generation_config.json").stat().st_size
    needed = beside + sum(t.nbytes for t in tiny.stored(made).values()) + saving.ROOM
    for free in (needed - 1, needed):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(free, 0, free))
        if free < needed:
            with pytest.raises(InputError, match=rf"disk space: {needed:,} bytes are needed, {free:,} are free"):
                convert(made, made.with_name("out"))
            assert only(made.parent, "made")
    convert(made, made.with_name("out"))


def test_the_source_is_named_where_the_source_is_wrong(made: Path) -> None:
    out = made.with_name("out")
    content = (made / tiny.SINGLE).read_bytes()
    (made / tiny.SINGLE).write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"^{made / tiny.SINGLE}: the header declares") as caught:
        convert(made, out)
    assert str(out) not in str(caught.value)
    assert only(made.parent, "made")


ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def test_every_tensor_is_aligned_to_its_elements_and_the_order_within_a_width_is_kept(made: Path) -> None:
    """Readers map the file: a float32 that begins at a byte that 4 does not divide is copied, or cannot be read."""
    tensors = tiny.stored(made)
    names = list(tensors)
    kinds = (torch.bfloat16, torch.float32, torch.float64)
    mixed = {name: tensor.to(kinds[i % 3]) for i, (name, tensor) in enumerate(tensors.items())}
    tiny.rewrite(made, mixed)
    convert(made, made.with_name("out"))
    stored = read_header(made.with_name("out") / tiny.SINGLE)
    assert stored.keys() == set(names)
    assert len({tensor.dtype for tensor in stored.values()}) == 3
    assert all(tensor.offset % ITEM_BYTES[tensor.dtype] == 0 for tensor in stored.values())
    said = (
        ("a", torch.bfloat16, (3,)),
        ("b", torch.float32, (1,)),
        ("c", torch.bfloat16, ()),
        ("d", torch.float64, (2,)),
    )
    (places,) = saving.plan_shards((Place(name=name, dtype=dtype, shape=shape) for name, dtype, shape in said), 100)
    assert [(place.name, place.start) for place in places] == [("d", 0), ("b", 16), ("a", 20), ("c", 26)]


def test_shards_are_filled_up_to_the_limit_and_not_beyond() -> None:
    five = [Place(name=str(i), dtype=torch.float32, shape=(n,)) for i, n in enumerate((2, 2, 1, 9, 1))]
    for limit, names in (
        (16, [["0", "1"], ["2"], ["3"], ["4"]]),
        (20, [["0", "1", "2"], ["3"], ["4"]]),
        (15.9, [["0"], ["1", "2"], ["3"], ["4"]]),
        (60, [["0", "1", "2", "3", "4"]]),
    ):
        assert [[place.name for place in shard] for shard in saving.plan_shards(iter(five), limit)] == names


def test_what_is_joined_from_two_dtypes_is_stored_in_one_that_holds_both(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "gpt2", 9)
    model = load(tmp_path / "made", dtype="bfloat16")
    k = model.get_parameter("blocks.0.attention.body.k.weight")
    k.data = torch.randn_like(k, dtype=torch.float32)
    save(model, tmp_path / "out", family="gpt2", carried={})
    joined = tiny.stored(tmp_path / "out")["transformer.h.0.attn.c_attn.weight"]  # columns of q, k, v in turn
    assert joined.dtype == torch.float32
    assert torch.equal(joined[:, tiny.D_MODEL : 2 * tiny.D_MODEL], k.data.t())
    assert tiny.stored(tmp_path / "out")["transformer.h.1.attn.c_attn.weight"].dtype == torch.bfloat16


def test_experts_stored_in_two_dtypes_are_read_in_one_that_holds_both(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = MixtralConfig(vocab_size=16, num_hidden_layers=1, num_local_experts=3, max_position_embeddings=16, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "made")
    tensors = tiny.stored(tmp_path / "made")
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    tensors[name.format(0)] = tensors[name.format(0)].bfloat16()
    tiny.rewrite(tmp_path / "made", tensors)
    (stack,) = (p for path, p in load(tmp_path / "made").named_parameters() if p.dim() == 3 and "gate" in path)
    for i in range(3):
        assert torch.equal(stack[i], tensors[name.format(i)].float())
