"""Where byte-level BPE cuts a text, by the name of `tokenizer.ggml.pre`: our tokens beside llama.cpp's.

The vocabulary is trained on the texts without any cut, so that its merges cross every place where one may be.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggml import reference
from tokenizers import Tokenizer as Trained
from tokenizers import models, normalizers, pre_tokenizers, trainers

from asbuilt.formats.gguf import read_header
from asbuilt.text.pretokenizers import PRE_TOKENIZERS
from asbuilt.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    reference.installed() is None, reason="llama.cpp's wheel xllamacpp is not installed (pip install -e '.[dev]')"
)
TEXT = (
    "It's DON'T we'll 123456 12 a1b2 foo_bar(x+=1); \"quoted\", naïve café — «ok» 日本語テキスト ひらがな 한국어 "
    "العربية ½ ² http://a.b/c?d=e&f\n\n  indented\tlines\r\n   trailing   \n#tag @user $5.00 100% "
    "[x]{y}<z> ...!!?? \u00a0nbsp 😀😀 Straße ÀÉÎ ﬁ  ,.;:  'S 'LL `code` ^~|"
)
PIECES = TEXT.split(" ")
MARKS = ("हिन्दी", "e\u0301a", "n\u0303o")
# These compose a text first (NFC), or have words with marks in them, for both of which llama.cpp has no means.
UNMARKED = ("qwen2", "deepseek-r1-qwen", "command-r", "gpt-4o", "llama4", "tekken")
SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
SIZES |= {"attention.head_count": 2, "rope.dimension_count": 16}


def texts(draw: random.Random, marks: bool) -> list[str]:
    pieces = PIECES + list(MARKS) if marks else PIECES
    joined = [" ".join(draw.choices(pieces, k=15)) for _ in range(60)]
    # to llama.cpp an accented capital is a small letter too: no new word begins at one, where case cuts
    together = pieces if marks else [piece for piece in pieces if piece != "ÀÉÎ"]
    return joined + ["".join(draw.choices(together, k=6)) for _ in range(30)]


def trained(corpus: list[str]) -> tuple[list[str], list[str]]:
    """Returns tokens and merges."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=6,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    made = json.loads(tokenizer.to_str())["model"]
    return sorted(made["vocab"], key=made["vocab"].get), [" ".join(merge) for merge in made["merges"]]


def write(path: Path, pre: str, tokens: list[str], merges: list[str]) -> Path:
    """Writes the smallest llama there is around the vocabulary."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(merges)
        writer.add_add_bos_token(False)

    return write_around(path, len(tokens), vocabulary)


def write_around(path: Path, n_vocab: int, vocabulary: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Writes the smallest llama there is."""
    tokens = range(n_vocab)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (SIZES | {"vocab_size": len(tokens)}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary(writer)
    outside = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    block = {"attn_norm": (32,), "ffn_norm": (32,)}
    block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (32, 32))
    for name, shape in (outside | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.01, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - {"gpt2"}))  # a name of older files' own
def test_a_text_is_cut_as_llama_cpp_cuts_it(pre: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    corpus = texts(random.Random(seed), marks=pre not in UNMARKED)
    path = write(tmp_path / "tokens.gguf", pre, *trained(corpus))
    ours, theirs = Tokenizer.from_gguf(read_header(path)), reference.tokens(path, corpus)
    for text, wanted in zip(corpus, theirs, strict=True):
        assert list(ours.encode(text)) == wanted, f"{text!r}, seed {seed}"


WORDS = [piece for piece in PIECES if piece.isascii() and piece.isprintable() and piece] + [
    "Größe",
    "café",
    "Straße",
    "ÀÉÎ",
    "日本語",
    "(a)",
    "don't",
]


def word_texts(draw: random.Random) -> list[str]:
    """Texts without lines and tabs, which a file of T5 makes spaces by its characters' map."""
    return [" ".join(draw.choices(WORDS, k=12)) for _ in range(60)]


def test_word_pieces_are_those_of_llama_cpp(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    corpus = word_texts(random.Random(seed))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Trained(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=special, show_progress=False)
    made.train_from_iterator(corpus[:40], trainer)
    vocab = sorted(made.get_vocab(), key=made.get_vocab().get)  # type: ignore[arg-type]
    tokens = [t if t in special else t[2:] if t.startswith("##") else "▁" + t for t in vocab]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 5 + [1] * (len(tokens) - 5))
        for id_, add in enumerate((writer.add_pad_token_id, writer.add_unk_token_id, writer.add_bos_token_id)):
            add(id_)
        writer.add_sep_token_id(3)
        writer.add_mask_token_id(4)

    path = write_around(tmp_path / "w.gguf", len(tokens), vocabulary)
    ours, theirs = Tokenizer.from_gguf(read_header(path)), reference.tokens(path, corpus)
    for text, wanted in zip(corpus, theirs, strict=True):
        assert list(ours.encode(text)) == wanted, f"{text!r}, seed {seed}"
        assert list(ours.encode(text)) == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("squeeze", [True, False])
def test_unigrams_are_those_of_llama_cpp(tmp_path: Path, squeeze: bool) -> None:
    seed = random.randrange(2**32)
    corpus = word_texts(random.Random(seed))
    made = Trained(models.Unigram())
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(corpus[:40], trainer)
    scored = json.loads(made.to_str())["model"]["vocab"]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([token for token, _ in scored])
        writer.add_token_scores([score for _, score in scored])
        writer.add_token_types([3, 3, 2] + [1] * (len(scored) - 3))
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(squeeze)
        writer.add_add_eos_token(False)

    path = write_around(tmp_path / "u.gguf", len(scored), vocabulary)
    texts = [*corpus, "  two  spaces ", "end "] if squeeze else corpus
    ours, theirs = Tokenizer.from_gguf(read_header(path)), reference.tokens(path, texts)
    for text, wanted in zip(texts, theirs, strict=True):
        assert list(ours.encode(text)) == wanted, f"{text!r}, seed {seed}"
