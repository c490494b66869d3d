"""WordPiece and Unigram vocabularies in GGUF keys: written and read again they split as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import SAMPLES
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile
from asbuilt.formats.gguf_write import Typed, header
from asbuilt.text.gguf_tokens import tokenizer_keys
from asbuilt.text.gguf_vocab import CONTROL, NORMAL, UNKNOWN, UNUSED
from asbuilt.text.tokenizer import Tokenizer

TEXTS = [*SAMPLES, "It's DON'T 123456 a1b2 naïve café — «ok» हिन्दी !!?? 日本語テキスト  foo_bar(x+=1)  two  spaces "]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMED = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}


def word_pieces(folder: Path, *, lower: bool) -> Path:
    made = Trained(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(TEXTS[:-2] * 3, trainer)
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
    return folder


def unigram(folder: Path, *, squeeze: bool = True, wraps: bool = True) -> Path:
    made = Trained(models.Unigram())
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces] if squeeze else [spaces])
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXTS[:-2] * 3, trainer)
    made.decoder = decoders.Metaspace()
    if wraps:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def keys_of(folder: Path, more: int = 0) -> dict[str, Any]:
    ours = Tokenizer.from_file(folder)
    found = tokenizer_keys(ours, folder / "tokenizer.json", ours.n_vocab + more)
    header(found, [])  # which a file takes
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}


def read_again(keys: dict[str, Any]) -> Tokenizer:
    values = {key: value.value if isinstance(value, Typed) else value for key, value in keys.items()}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return Tokenizer.from_gguf(GGUFFile(path=Path("made"), metadata=metadata, tensors={}))


def assert_alike(ours: Tokenizer, again: Tokenizer) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert again.encode(text) == ids
        assert again.encode(text, wrap=True) == ours.encode(text, wrap=True)
        assert again.decode(ids) == ours.decode(ids)
    assert (again.bos_id, again.eos_ids, again.add_bos) == (ours.bos_id, ours.eos_ids, ours.add_bos)


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces(tmp_path: Path, lower: bool) -> None:
    folder = word_pieces(tmp_path / "t", lower=lower)
    keys, ours = keys_of(folder, 2), Tokenizer.from_file(folder)
    n = ours.n_vocab
    assert keys["model"] == "bert"
    assert keys["tokens"][:5] == SPECIAL
    assert keys["token_type"][:5] == [CONTROL] * 5
    assert keys["token_type"][5:] == [NORMAL] * (n - 5) + [UNUSED] * 2
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for token, id_ in vocab.items():
        if id_ >= 5:
            assert keys["tokens"][id_] == (token[2:] if token.startswith("##") else f"▁{token}")
    ids = {"bos": 2, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    assert {name: keys[f"{name}_token_id"] for name in ids} == ids
    again = read_again(keys)
    assert_alike(ours, again)
    assert {name: again.named.get(name) for name in NAMED} == NAMED
    again.save(tmp_path)
    assert_alike(ours, Tokenizer.from_file(tmp_path))


@pytest.mark.parametrize("squeeze", [True, False])
@pytest.mark.parametrize("wraps", [True, False])
def test_unigrams(tmp_path: Path, squeeze: bool, wraps: bool) -> None:
    folder = unigram(tmp_path / "t", squeeze=squeeze, wraps=wraps)
    keys, ours = keys_of(folder, 3), Tokenizer.from_file(folder)
    said = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert keys["model"] == "t5"
    assert keys["tokens"][:-3] == [token for token, _ in said]
    assert keys["scores"][:-3] == pytest.approx([score for _, score in said])
    assert keys["token_type"][:3] == [CONTROL, CONTROL, UNKNOWN]
    assert (keys["unknown_token_id"], keys["eos_token_id"], keys["padding_token_id"]) == (2, 1, 0)
    assert (keys["add_space_prefix"], keys["remove_extra_whitespaces"], keys["add_eos_token"]) == (True, squeeze, wraps)
    again = read_again(keys)
    assert_alike(ours, again)
    again.save(tmp_path)
    assert_alike(ours, Tokenizer.from_file(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer, pre_tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "normalizer, pre_tokenizer"),
    ],
)
def test_other_steps_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    for folder in (word_pieces(tmp_path / "w", lower=True), unigram(tmp_path / "u")):
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(InputError, match=said):
            keys_of(folder)


def test_names_that_a_file_needs(tmp_path: Path) -> None:
    folder = word_pieces(tmp_path / "w", lower=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}))
    with pytest.raises(InputError, match="cls_token"):
        keys_of(folder)


def test_damaged_keys_are_refused(tmp_path: Path) -> None:
    words, pieces = keys_of(word_pieces(tmp_path / "w", lower=True)), keys_of(unigram(tmp_path / "u"))
    for keys, change, said in (
        (words, {"unknown_token_id": 10**6}, "unknown_token_id: id outside"),
        (words, {"seperator_token_id": "x"}, "seperator_token_id: wrong type"),
        (words, {"tokens": [*words["tokens"][:-1], words["tokens"][-2]]}, "tokens: duplicate"),
        (pieces, {"scores": pieces["scores"][:-1]}, "scores: wrong length"),
        (pieces, {"precompiled_charsmap": [700]}, "precompiled_charsmap: wrong bytes"),
        (pieces, {"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap: is none that"),
        (pieces, {"scores": [float("nan"), *pieces["scores"][1:]]}, "scores: is no number"),
        (pieces, {"remove_extra_whitespaces": 1}, "remove_extra_whitespaces: wrong type"),
    ):
        with pytest.raises(InputError, match=said):
            read_again(keys | change)
