"""Tokenizers written to GGUF keys: what is read of them again splits as before, and what they cannot say is refused."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from folders import added, around, tokenizer_json, write
from test_tokenizer import SAMPLES, smollm2_path
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile, read_header
from asbuilt.text.gguf_tokens import tokenizer_keys
from asbuilt.text.gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from asbuilt.text.pretokenizers import PRE_TOKENIZERS
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer

TEXTS = [*SAMPLES, "It's DON'T 123456 a1b2 naïve café — «ok» हिन्दी e\u0301a !!?? 日本語テキスト  foo_bar(x+=1)"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}
QWEN2 = LLAMA3.replace("{1,3}", "")


def split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTES | {"use_regex": False}]}


def trained() -> tuple[dict[str, int], list[list[str]]]:
    """Returns a vocabulary of bytes and some hundred merges, learned without any split."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, max_token_length=6, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    made = json.loads(tokenizer.to_str())["model"]
    return made["vocab"], made["merges"]


VOCAB, MERGES = trained()
MODEL = {"type": "BPE", "vocab": VOCAB, "merges": MERGES}


def keys_of(folder: Path, n_vocab: int) -> dict[str, Any]:
    found = tokenizer_keys(Tokenizer.from_file(folder), folder / "tokenizer.json", n_vocab)
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}


def read_again(keys: dict[str, Any]) -> Tokenizer:
    metadata = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.from_gguf(GGUFFile(path=Path("made"), metadata=metadata, tensors={}))


@pytest.mark.parametrize(
    ("name", "pre", "normalizer", "ignores"),
    [
        ("gpt-2", BYTES, None, False),
        ("smollm", DIGITS, None, False),
        ("llama-bpe", split(LLAMA3), None, True),
        ("dbrx", split(LLAMA3), None, False),
        ("qwen2", split(QWEN2), {"type": "NFC"}, False),
        ("stablelm2", split(QWEN2), None, False),
        ("bloom", split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), None, False),
    ],
)
def test_published_splits_have_their_names(
    tmp_path: Path, name: str, pre: dict[str, Any], normalizer: dict[str, Any] | None, ignores: bool
) -> None:
    """As the published tokenizer.json of each says it."""
    said = tokenizer_json(
        model=MODEL | {"ignore_merges": ignores},
        pre_tokenizer=pre,
        normalizer=normalizer,
        decoder=BYTES,
        added_tokens=[added(len(VOCAB), "<|end|>"), added(len(VOCAB) + 1, "<tool>", special=False)],
    )
    folder = write(tmp_path / "t", said, tokenizer_config={"eos_token": "<|end|>", "pad_token": "<|end|>"})
    keys, n = keys_of(folder, len(VOCAB) + 4), len(VOCAB)
    assert (keys["model"], keys["pre"]) == ("gpt2", name)
    assert keys["tokens"][n:] == ["<|end|>", "<tool>", f"[PAD{n + 2}]", f"[PAD{n + 3}]"]
    assert keys["token_type"][n - 1 :] == [NORMAL, CONTROL, USER_DEFINED, UNUSED, UNUSED]
    assert keys["merges"] == [" ".join(pair) for pair in MERGES]
    assert (keys["eos_token_id"], keys["padding_token_id"]) == (n, n)
    assert (keys["add_bos_token"], keys["add_eos_token"]) == (False, False)
    assert "bos_token_id" not in keys
    ours, again = Tokenizer.from_file(folder), read_again(keys)
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
        assert again.encode(f"{text}<|end|><tool>", special=True) == ours.encode(f"{text}<|end|><tool>", special=True)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_split_that_is_read_is_written(tmp_path: Path, name: str) -> None:
    tokens = [*sorted(VOCAB, key=lambda token: VOCAB[token]), "<s>", "</s>"]
    types = [NORMAL] * len(VOCAB) + [CONTROL] * 2
    said: dict[str, Any] = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types}
    said |= {"merges": [" ".join(pair) for pair in MERGES], "bos_token_id": len(VOCAB), "eos_token_id": len(VOCAB) + 1}
    said |= {"add_bos_token": True, "add_eos_token": name == "gpt2"}
    ours = read_again(said)
    ours.save(tmp_path)
    keys = keys_of(tmp_path, len(tokens))
    assert PRE_TOKENIZERS[keys["pre"]].patterns == PRE_TOKENIZERS[name].patterns
    assert {key: keys[key] for key in said if key != "pre"} == {key: said[key] for key in said if key != "pre"}
    again = read_again(keys)
    assert all(again.encode(text, wrap=True) == ours.encode(text, wrap=True) for text in TEXTS)


def test_the_published_file_is_written_again(tmp_path: Path) -> None:
    metadata = read_header(smollm2_path()).metadata
    Tokenizer.from_gguf(GGUFFile(path=Path("x"), metadata=metadata, tensors={})).save(tmp_path)
    found = tokenizer_keys(Tokenizer.from_file(tmp_path), tmp_path / "tokenizer.json", 49152)
    wanted = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    wanted.pop("tokenizer.ggml.add_space_prefix")  # of SentencePiece alone
    assert found == wanted | {"tokenizer.ggml.add_eos_token": False}


# SentencePiece.


def pieces(seed: int) -> tuple[list[str], list[float], list[int]]:
    """Returns a vocabulary of letters, bytes and pieces that grow by one letter, some with two ways to be made."""
    draw = random.Random(seed)
    letters = list("▁abcdefgh")
    made: list[str] = []
    while len(made) < 60:
        left, right = draw.choice(letters + made), draw.choice(letters + made)
        if len(left + right) < 9 and left + right not in made:
            made.append(left + right)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(made) + len(letters))]
    return tokens, [-float(i) for i in range(len(tokens))], types


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_scores_of_sentencepiece_give_the_same_merges(tmp_path: Path, seed: int, prefix: bool) -> None:
    tokens, scores, types = pieces(seed)
    said: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    said |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix}
    ours = read_again(said)
    ours.save(tmp_path)
    keys = keys_of(tmp_path, len(tokens))
    same = {key: value for key, value in said.items() if key != "scores"}
    assert {key: keys[key] for key in same} == same
    merged = [score for score in keys["scores"] if score > -1e9]
    assert all(a > b for a, b in pairwise(merged))  # in the order of the ids, as they were made
    again, draw = read_again(keys), random.Random(seed)
    texts = ["".join(draw.choices("abcdefgh   é", k=40)) for _ in range(20)]
    assert [again.encode(text, wrap=True) for text in texts] == [ours.encode(text, wrap=True) for text in texts]


def spm(**more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A tokenizer.json of SentencePiece's kind: a, b, ab and bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "ba", "aba"]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>"}
    model |= {"merges": [["a", "b"], ["b", "a"], ["ab", "a"], ["a", "ba"]], "byte_fallback": True, "fuse_unk": True}
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    return tokenizer_json(model=model | more.pop("model", {}), decoder=decoder, **more)


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
AFTER_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre", "prefix"),
    [
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}, None, True),
        (SPACES, None, False),
        (SPACES, AFTER_SPACES, False),
        (None, METASPACE | {"prepend_scheme": "always"}, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
    ],
)
def test_ways_to_write_spaces(
    tmp_path: Path, normalizer: dict[str, Any] | None, pre: dict[str, Any] | None, prefix: bool
) -> None:
    keys = keys_of(write(tmp_path / "t", spm(normalizer=normalizer, pre_tokenizer=pre)), 263)
    assert (keys["model"], keys["add_space_prefix"]) == ("llama", prefix)
    assert keys["scores"][-3:] == [0.0, -1.0, -2.0]


def test_merges_that_no_scores_give_are_refused(tmp_path: Path) -> None:
    """`aba` is made of `ab` and `a` alone, where a score lets `a` and `ba` make it too."""
    merges = [["a", "b"], ["b", "a"], ["ab", "a"]]
    folder = write(tmp_path / "t", spm(normalizer=SPACES, model={"merges": merges}))
    with pytest.raises(InputError, match=r"model\.merges: a GGUF file cannot say this"):
        keys_of(folder, 263)


WORDS = {"type": "WordPiece", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]", "max_input_chars_per_word": 9}
WORDS["continuing_subword_prefix"] = "##"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (tokenizer_json(model=WORDS), "BertNormalizer"),
        (tokenizer_json(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "WordLevel"),
        (tokenizer_json(model=MODEL, pre_tokenizer=BYTES | {"add_prefix_space": True}), "pre_tokenizer.*ByteLevel"),
        (tokenizer_json(model=MODEL, pre_tokenizer=split(r"\p{L}+")), "pre_tokenizer: .*a split that has a name"),
        (tokenizer_json(model=MODEL, pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer.*Whitespace"),
        (tokenizer_json(model=MODEL | {"dropout": 0.5}, pre_tokenizer=BYTES), r"model\.dropout"),
        (tokenizer_json(model=MODEL, pre_tokenizer=BYTES, normalizer={"type": "Lowercase"}), "normalizer.*Lowercase"),
        (spm(pre_tokenizer={"type": "Whitespace"}), "Whitespace.*spaces written as"),
        (spm(), "spaces written as"),
    ],
)
def test_what_no_key_says_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"tokenizer\.json: .*{message}|{message}.*tokenizer\.json"):
        keys_of(write(tmp_path / "t", said), 600)


def test_tokens_beyond_the_table_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", tokenizer_json(model=MODEL, pre_tokenizer=BYTES, decoder=BYTES))
    with pytest.raises(InputError, match=r"a token beyond the model's table.*0 to 99"):
        keys_of(folder, 100)


def test_a_text_that_would_be_split_otherwise_is_noticed(tmp_path: Path) -> None:
    """A token that takes the space before it along does so in no GGUF file."""
    said = tokenizer_json(
        model=MODEL,
        pre_tokenizer=BYTES,
        decoder=BYTES,
        added_tokens=[added(len(VOCAB), "fox", special=False, lstrip=True)],
    )
    with pytest.raises(InputError, match="would split texts differently"):
        keys_of(write(tmp_path / "t", said), len(VOCAB) + 1)


def test_wrapping_is_said(tmp_path: Path) -> None:
    ids = {"<s>": len(VOCAB), "</s>": len(VOCAB) + 1}
    said = tokenizer_json(
        model=MODEL,
        pre_tokenizer=BYTES,
        decoder=BYTES,
        added_tokens=[added(id_, token) for token, id_ in ids.items()],
        post_processor=around(["<s>", "$A", "</s>"], ids),
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    keys = keys_of(write(tmp_path / "t", said, tokenizer_config=config), len(VOCAB) + 2)
    assert (keys["add_bos_token"], keys["add_eos_token"]) == (True, True)
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert read_again(keys).encode("a", wrap=True)[0] == ids["<s>"]
    assert len(BYTE_OF) == 256
