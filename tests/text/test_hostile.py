"""Tokenizer files that hang, blow up or trip the library: one message each, within its budget, and the next works."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from folders import LETTERS, added, around, tokenizer_json, write

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile
from asbuilt.text import chat
from asbuilt.text.chat import encode_chat
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.text.tokenizer_worker import Distant, load
from asbuilt.text.worker import WorkerError

DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False}


def rules(*many: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(many)}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def model(kind: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"model": {"type": kind} | more}


CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"\0\0\0\0" + b"abc\0").decode()
MAP = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
WORDS = {"vocab": {"a": 0}, "unk_token": "[UNK]"}
# What is in the file, the text, and what is said.
HOSTILE: dict[str, tuple[dict[str, Any] | str, str, str]] = {
    "forty doublings": ({"normalizer": rules(*[DOUBLING] * 40)}, "a", "MiB of memory|CPU time"),
    "27 doublings": ({"normalizer": rules(*[DOUBLING] * 27)}, "a", "MiB of memory|CPU time"),
    "doublings before a cut": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
        "é",
        "MiB of memory|CPU time",
    ),
    "a pattern that tries every split": ({"pre_tokenizer": split("(a+)+$")}, "a" * 40 + "b", "retry-limit"),
    "less than the library's limit, often": (
        {"pre_tokenizer": split("(a+)+$")},
        ("a" * 20 + "b") * 500,
        "CPU time",
    ),
    "a prefix longer than the token": (
        model("BPE", vocab={"a": 0, "b": 1, "ab": 2}, merges=["a b"], continuing_subword_prefix="####"),
        "ab",
        "range",
    ),
    "an empty replacement": (
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"}},
        "a",
        "character",
    ),
    "pieces of no letters": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "a", "chunk size"),
    "an unknown word": (model("WordLevel", **WORDS), "b", r"cannot read the text.*\[UNK\]"),
    "an unknown piece": (
        model("WordPiece", continuing_subword_prefix="##", max_input_chars_per_word=9, **WORDS),
        "b",
        r"\[UNK\]",
    ),
    "an unknown letter": (model("Unigram", vocab=[["a", 0.0]], unk_id=None), "b", "unk_id"),
    "a broken map": ({"normalizer": MAP}, "abc", "out of bounds"),
    "a broken map, twice": ({"normalizer": rules(MAP, MAP)}, "abc", "out of bounds"),
    "a map that is none": ({"normalizer": MAP | {"precompiled_charsmap": "AAAA"}}, "abc", "precompiled_charsmap"),
    "half a surrogate pair": ('{"model": {"type": "BPE", "vocab": {"\\ud800": 0}, "merges": []}}', "a", "hex escape"),
    "1e400": ('{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 1e400]]}}', "a", "out of range"),
    "10^400": ('{"model": {"type": "BPE", "vocab": {"a": 1%s}, "merges": []}}' % ("0" * 400), "a", "out of range"),
    "Infinity": ('{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -Infinity]]}}', "a", "invalid number"),
    "nested deeply": ("[" * 100_000, "a", "not a tokenizer"),
    "steps in steps": ('{"normalizer": {"type": "Sequence", "normalizers": [' * 999, "a", "not a tokenizer"),
}
SECONDS, MEMORY = 2.0, 100 << 20  # of a child, started, loaded and ended; 1 of it for the file


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("case", HOSTILE)
def test_one_message_within_the_budget(case: str, tmp_path: Path) -> None:
    said, text, message = HOSTILE[case]
    before = spent()
    with pytest.raises(InputError, match=message) as caught:
        Tokenizer.from_file(write(tmp_path, said if isinstance(said, str) else tokenizer_json(**said))).encode(text)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert spent() - before < SECONDS


@pytest.mark.parametrize("doublings", [19, 20])
def test_a_panic_where_no_memory_is_left_does_not_wait_for_itself(
    doublings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's backtrace takes memory; without any it locked itself in. Whoever waited for it is let go after a while."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    folder = write(tmp_path, tokenizer_json(normalizer=rules(*[DOUBLING] * doublings, MAP)))
    distant = Distant(folder / "tokenizer.json", 4096)
    distant.facts()
    assert distant._worker.pid is not None
    rescue = threading.Timer(60, os.kill, (distant._worker.pid, signal.SIGTERM))
    rescue.start()
    try:
        with pytest.raises(WorkerError, match=r"out of bounds|MiB of memory"):
            distant.encode("a", False, False)
    finally:
        rescue.cancel()


def test_a_text_that_was_too_much_ends_nothing_else(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(write(tmp_path, tokenizer_json(pre_tokenizer=split("(a+)+$"))))
    for text in ("a" * 40 + "b", ("a" * 20 + "b") * 500):
        with pytest.raises(InputError, match=r"retry-limit|CPU time"):
            tokenizer.encode(text)
        assert tokenizer.encode("abc") == [0, 1, 2]
        assert tokenizer.decode([0, 1]) == "a b"  # without a decoder, the library puts spaces between


def test_tokens_without_end_around_a_text(tmp_path: Path) -> None:
    many = around(["x"] * 30_000, {})
    many["special_tokens"] = {"x": {"id": "x", "ids": [0] * 30_000, "tokens": ["a"] * 30_000}}
    with pytest.raises(InputError, match=r"MiB of memory|CPU time"):
        Tokenizer.from_file(write(tmp_path, tokenizer_json(post_processor=many))).encode("a", wrap=True)


def test_a_decoder_that_doubles(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [DOUBLING] * 40}
    tokenizer = Tokenizer.from_file(write(tmp_path, tokenizer_json(decoder=decoder)))
    with pytest.raises(InputError, match=r"cannot decode.*(MiB of memory|CPU time)"):
        tokenizer.decode([0])


def test_two_million_tokens(tmp_path: Path) -> None:
    vocab = ",".join(f'"{i:x}":{i}' for i in range(2_000_000))
    before = spent()
    with pytest.raises(InputError, match=r"too many tokens.*1,048,576"):
        Tokenizer.from_file(write(tmp_path, '{"model":{"type":"BPE","merges":[],"vocab":{' + vocab + "}}}"))
    assert spent() - before < SECONDS


@pytest.mark.parametrize("sign", [":", "["])
def test_entries_are_counted_before_they_are_read(sign: str, tmp_path: Path) -> None:
    """2^20 tokens or merges, and an eighth more for signs of other parts; the library has its own word for the rest."""
    path, most = tmp_path / "tokenizer.json", 1_048_576 + 131_072
    path.write_text(sign * most)
    with pytest.raises(Exception, match="expected") as caught:
        load(path, most)
    assert not isinstance(caught.value, InputError)
    path.write_text(sign * (most + 1))
    with pytest.raises(InputError, match=r"too many tokens or merges \(got 1179649; must be at most 1,048,576\)"):
        load(path, most + 1)


def test_ids_are_numbers_of_32_bits(tmp_path: Path) -> None:
    """Beyond, the library has no answer but an overflow."""
    write(
        tmp_path,
        tokenizer_json(model={"type": "BPE", "vocab": {"a": 0, "b": 70_000, "c": 4_294_967_295}, "merges": []}),
    )
    engine = load(tmp_path / "tokenizer.json", 4096)
    assert [engine.token(id_) for id_ in (0, 70_000, 2**32 - 1, 2**32, 2**33 - 1, -1)] == [
        "a",
        "b",
        "c",
        None,
        None,
        None,
    ]
    assert engine.decode([0, 70_000, 2**32 - 1, 2**32, 2**33 - 1, -1], False) == "a b c"
    assert engine.n_vocab() == 2**32


@pytest.mark.parametrize(
    ("name", "most"),
    [("tokenizer.json", 1 << 26), ("tokenizer_config.json", 1 << 24), ("chat_template.jinja", 1 << 20)],
)
def test_a_file_too_large_is_not_opened(name: str, most: int, tmp_path: Path) -> None:
    """64, 16 and 1 MiB; one byte less is opened, and of the first found to be no tokenizer."""
    write(tmp_path, tokenizer_json(), tokenizer_config={})
    text = {"chat_template.jinja": "", "tokenizer_config.json": "{}"}.get(name, "")
    for nbytes, said in ((most, None), (most + 1, "too large")):
        with (tmp_path / name).open("w") as file:
            file.write(text.ljust(nbytes))
        if name == "tokenizer.json" or said:
            with pytest.raises(InputError, match=said or "EOF"):
                Tokenizer.from_file(tmp_path)
        else:
            assert Tokenizer.from_file(tmp_path).encode("ab") == [0, 1]


BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
)


@pytest.mark.parametrize("name", BESIDE)
def test_pipes_and_devices_are_not_opened(name: str, tmp_path: Path) -> None:
    write(tmp_path, tokenizer_json())
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path = tmp_path / name
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(InputError, match=f"{name}: is a pipe, a socket or a device"):
            Tokenizer.from_file(tmp_path)
        path.unlink()


CONFIGS: dict[str, tuple[str, str, str]] = {
    "template names": (
        "tokenizer_config",
        '{"chat_template": [{"name": ["a"], "template": ""}]}',
        "chat_template: must be",
    ),
    "template's kind": ("tokenizer_config", '{"chat_template": {"a": 1}}', "chat_template: must be a string"),
    "named template's kind": (
        "tokenizer_config",
        '{"chat_template": [{"name": "default", "template": 1}]}',
        "template",
    ),
    "no entry": ("tokenizer_config", '{"chat_template": ["a"]}', "chat_template: must be"),
    "digits": ("tokenizer_config", '{"model_max_length": 1%s}' % ("0" * 400), "too long"),
    "surrogate": ("tokenizer_config", '{"bos_token": "\\ud800"}', "surrogate"),
    "end": ("generation_config", '{"eos_token_id": "2"}', "generation_config.json: eos_token_id"),
    "ends": ("config", '{"eos_token_id": [1, null, true]}', "config.json: eos_token_id"),
    "inner end": ("config", '{"text_config": {"eos_token_id": 2.5}}', "config.json: eos_token_id"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configurations_are_one_message(case: str, tmp_path: Path) -> None:
    name, said, message = CONFIGS[case]
    write(tmp_path, tokenizer_json())
    (tmp_path / f"{name}.json").write_text(said)
    with pytest.raises(InputError, match=message):
        Tokenizer.from_file(tmp_path)


def test_infinity_beside_is_read(tmp_path: Path) -> None:
    """As other writers of JSON put a length without end."""
    write(tmp_path, tokenizer_json(), tokenizer_config={"model_max_length": float("inf")})
    assert Tokenizer.from_file(tmp_path).max_tokens is None


def test_thousands_of_control_tokens_on_a_long_text(tmp_path: Path) -> None:
    """Ids by hand: the message's own tokens are spelled out, the template's stand whole."""
    vocab = {letter: i for i, letter in enumerate(LETTERS + "<>0123456789")}
    tokens = [added(len(vocab) + i, f"<{'abcd'[i % 4]}{i}>") for i in range(5000)]
    model_ = {"type": "BPE", "vocab": vocab, "merges": []}
    template = "<a0>{{ messages[0].content }}<b1>"
    write(tmp_path, tokenizer_json(added_tokens=tokens, model=model_), tokenizer_config={"chat_template": template})
    tokenizer = Tokenizer.from_file(tmp_path)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    ids = encode_chat(tokenizer, [{"role": "user", "content": "he <c77> abcd" * 20_000}])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 3
    spelled = [vocab[letter] for letter in "he <c77> abcd"]  # the vocabulary has no l and no o
    assert ids == [len(vocab), *spelled * 20_000, len(vocab) + 1]


def test_control_tokens_by_their_number_and_length() -> None:
    assert chat._any_of(("ab", "abc", "x")).findall("abcabxab") == ["abc", "ab", "x", "ab"]
    assert chat._any_of(("ab", "abc", "x"), shortest=True).findall("abcabxab") == ["ab", "ab", "x", "ab"]
    assert chat._any_of(("abc", "ab", "x"), shortest=True).findall("abcabxab") == ["ab", "ab", "x", "ab"]
    for n in (15, 16, 17, 33, 5000):
        many = tuple(chr(0x4E00 + i) + ".*"[i % 2] for i in range(n))
        assert chat._any_of(many).findall("".join(many)) == list(many)
    assert chat._any_of(()).search("a") is None
    assert chat._any_of(("ab",) * 65_536).findall("ab") == ["ab"]
    with pytest.raises(InputError, match=r"too many.*\(got 65537; must be at most 65,536\)"):
        chat._any_of(("ab",) * 65_537)
    assert chat._any_of(("a" * 256,)).findall("a" * 257) == ["a" * 256]
    with pytest.raises(InputError, match=r"too long.*must be at most 256 characters"):
        chat._any_of(("a" * 257,))
    with pytest.raises(InputError, match="share a prefix"):
        chat._any_of(tuple("a" * n + chr(0x4E00 + i) for n in range(255) for i in range(16)))


def test_a_control_token_of_one_letter_in_a_message(tmp_path: Path) -> None:
    config = {"chat_template": "{{ messages[0].content }}"}
    write(tmp_path, tokenizer_json(added_tokens=[added(9, "!")]), tokenizer_config=config)
    with pytest.raises(InputError, match=r"one character.*'!'"):
        encode_chat(Tokenizer.from_file(tmp_path), [{"content": "a!"}])


def test_pieces_of_a_gguf_that_are_too_long_together() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"{i:0512d}" for i in range(8200))]
    keys = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    file = GGUFFile(path=Path("made"), metadata={f"tokenizer.ggml.{k}": v for k, v in keys.items()}, tensors={})
    with pytest.raises(InputError, match="too long in total"):
        Tokenizer.from_gguf(file)


def test_control_tokens_of_a_gguf_are_counted() -> None:
    for n in (65_536, 65_537):
        keys = {"model": "gpt2", "tokens": [f"x{i}" for i in range(n)], "merges": [], "token_type": ([3, 4] * n)[:n]}
        file = GGUFFile(path=Path("made"), metadata={f"tokenizer.ggml.{k}": v for k, v in keys.items()}, tensors={})
        if n == 65_536:
            assert Tokenizer.from_gguf(file).encode("x1x1") == [1, 1]
        else:
            with pytest.raises(InputError, match=r"token_type: too many.*\(got 65537; must be at most 65,536\)"):
                Tokenizer.from_gguf(file)


def test_limits_are_of_the_file_and_the_text(tmp_path: Path) -> None:
    """A larger file and a longer text may take more: an ordinary one is never near the limit."""
    write(tmp_path, tokenizer_json())
    nbytes = (tmp_path / "tokenizer.json").stat().st_size
    distant = Distant(tmp_path / "tokenizer.json", nbytes)
    assert len(distant.encode("abc" * 100_000, False, False)[0]) == 300_000
    assert json.loads(distant.saved())["model"]["vocab"]["a"] == 0
