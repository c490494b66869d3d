"""Byte pair encoding: ours in plain Python, the library's training and encoding, and the published split patterns."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from asbuilt.errors import InputError
from asbuilt.text import bpe
from asbuilt.text.compare import SAMPLES, compare
from asbuilt.text.cut import cut
from asbuilt.text.gguf_tokens import tokenizer_keys
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer
from asbuilt.text.train import PATTERNS, characters, pre_tokens, train

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
# Few letters, so that pairs repeat, overlap and tie.
TIGHT = st.lists(st.text("ab c", min_size=1, max_size=30), min_size=1, max_size=6)
# As tiktoken published them first.
PUBLISHED = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}
CONSONANTS = [chr(code) for code in range(0x0C15, 0x0C3A) if unicodedata.category(chr(code)) == "Lo"]
VOWEL_SIGNS = [chr(code) for code in range(0x0C3E, 0x0C4D) if unicodedata.category(chr(code)).startswith("M")]


def words() -> list[str]:
    return ["".join(random.choices("abcde", k=random.randint(1, 6))) for _ in range(40)]


def some_text(n_words: int = 400) -> str:
    known = words()
    return " ".join(random.choices(known, k=n_words))


def by_library(texts: list[str], size: int, least: int, cuts: pre_tokenizers.PreTokenizer) -> list[tuple[bytes, bytes]]:
    """The merges of the library's own trainer."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = cuts
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=least, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(texts, trainer)
    return [(characters(left), characters(right)) for left, right in json.loads(made.to_str())["model"]["merges"]]


def test_counts_and_one_merge() -> None:
    a, b = b"a", b"b"
    assert bpe.pair_counts({(a, a, a): 2, (a, b): 3, (b,): 9}) == {(a, a): 4, (a, b): 3}
    assert bpe.merge((a, a, a, b, a, a), (a, a)) == (b"aa", a, b, b"aa")
    assert bpe.merge((a, b), (b, a)) == (a, b)
    assert bpe.merge((), (a, b)) == ()


def test_the_textbook_example() -> None:
    """aaabdaaabac: first aa, then ab, then aaab, as in every description of the method."""
    merges = bpe.learn(bpe.words_of([b"aaabdaaabac"]), 259)
    assert merges == [(b"a", b"a"), (b"a", b"b"), (b"aa", b"ab")]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    assert bpe.encode(tuple(b"aaabdaaabac"[i : i + 1] for i in range(11)), ranks) == (
        b"aaab",
        b"d",
        b"aaab",
        b"a",
        b"c",
    )
    assert [*bpe.vocabulary(merges)][256:] == [b"aa", b"ab", b"aaab"]


def test_a_vocabulary_of_bytes() -> None:
    ids = bpe.vocabulary([])
    assert sorted(ids) == [bytes([byte]) for byte in range(256)]
    assert [*ids.values()] == [*range(256)]
    assert ids == {bytes([byte]): at for at, byte in enumerate(BYTE_OF.values())}
    assert (ids[b"!"], ids[b"\0"]) == (0, 188)  # as in GPT-2's vocab.json


@given(TIGHT, st.integers(256, 280), st.integers(1, 3))
def test_learning_equals_the_library(texts: list[str], size: int, least: int) -> None:
    """Merge by merge, ties included."""
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pieces = [characters(piece) for text in texts for piece, _ in cuts.pre_tokenize_str(text)]
    assert bpe.learn(bpe.words_of(pieces), size, min_count=least) == by_library(texts, size, least, cuts)


def test_learning_equals_the_library_on_longer_texts() -> None:
    text, size = some_text(2000), random.randint(300, 400)
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pieces = [characters(piece) for piece, _ in cuts.pre_tokenize_str(text)]
    assert bpe.learn(bpe.words_of(pieces), size) == by_library([text], size, 2, cuts)


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=3), st.text("abc", min_size=1, max_size=3)), max_size=12))
def test_merges_in_rank_order_equal_the_library(pairs: list[tuple[str, str]]) -> None:
    """For any merges, such as no training makes: the tokens of any word are the library's."""
    known, ranks = {letter: i for i, letter in enumerate("abc")}, {}
    for left, right in pairs:
        if left in known and right in known and (left, right) not in ranks:
            known.setdefault(left + right, len(known))
            ranks[left, right] = len(ranks)
    theirs = tokenizers.Tokenizer(models.BPE(vocab=known, merges=[*ranks]))
    for _ in range(20):
        word = "".join(random.choices("abc", k=random.randint(1, 12)))
        assert list(bpe.encode(tuple(word), ranks)) == theirs.encode(word).tokens
        state = tuple(word)
        for step in bpe.steps(state, ranks):
            at = next(i for i in range(len(state)) if state[i : i + 2] == step.pair)
            state = (*state[:at], "".join(step.pair), *state[at + 2 :])
            assert (state, ranks[step.pair]) == (step.word, step.rank)


@given(st.binary(max_size=40), st.lists(st.binary(min_size=1, max_size=20), max_size=8))
def test_any_bytes_come_back(data: bytes, learned_from: list[bytes]) -> None:
    merges = bpe.learn(bpe.words_of([*learned_from, data, data]), 300)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    tokens = bpe.encode([data[i : i + 1] for i in range(len(data))], ranks)
    assert b"".join(tokens) == data
    assert set(tokens) <= set(bpe.vocabulary(merges))


@pytest.fixture(scope="module", params=PATTERNS)
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    random.seed(request.param)
    return train([some_text(), *SAMPLES.values()], 340, pattern=request.param, special=["<|end|>"])


@given(TEXTS)
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert b"".join(trained.spelled(trained.token(id_) or "") for id_ in ids) == text.encode()
    assert max(ids, default=0) < 339  # a special token is never spelled by a text


@given(TEXTS)
def test_the_cut_of_a_text_ends_in_its_tokens(trained: Tokenizer, text: str) -> None:
    made = cut(trained, text + " abc abcde")
    assert [id_ for one in made for id_ in one.ids] == trained.encode(text + " abc abcde")
    assert b"".join(trained.spelled(one.piece) for one in made) == (text + " abc abcde").encode()
    for one in made:
        assert len(one.steps) == len(one.piece) - len(one.tokens)
        assert "".join(one.tokens) == one.piece
        assert all(
            len(after.word) == len(before.word) - 1 for before, after in zip(one.steps, one.steps[1:], strict=False)
        )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_training_is_what_the_plain_one_computes(pattern: str) -> None:
    text, size = some_text() + "\n" + some_text(), random.randint(280, 330)
    made = train([text], size, pattern=pattern)
    pieces = pre_tokens(text, pattern) if pattern != "none" else [line.encode() for line in text.splitlines(True)]
    merges = bpe.learn(bpe.words_of(pieces), size)
    assert [made.spelled(made.token(id_) or "") for id_ in range(made.n_vocab)] == [*bpe.vocabulary(merges)]
    assert len(made.encode(text)) == sum(
        len(bpe.encode([piece[i : i + 1] for i in range(len(piece))], {pair: i for i, pair in enumerate(merges)}))
        for piece in pieces
    )


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_split_as_published(pattern: str) -> None:
    """Against the patterns as tiktoken has them, run by another engine."""
    alphabet = "ab Zé1２½'st.,/!\r\n\t  ్తెకdD日𝔘ǅ_ــ"
    for _ in range(400):
        text = "".join(random.choices(alphabet, k=random.randint(0, 24)))
        wanted = [piece.encode() for piece in regex.findall(PUBLISHED[pattern], text)]
        if pattern == "cl100k" and regex.search(r"[\r\n]\s*[\r\n]", text):
            continue  # published as \s*[\r\n]+ first, and later otherwise
        assert pre_tokens(text, pattern) == wanted, text


def telugu_word(n_letters: int, share: float) -> str:
    letters = (
        (random.choice(CONSONANTS), random.choice(VOWEL_SIGNS) if random.random() < share else "")
        for _ in range(n_letters)
    )
    return "".join(part for pair in letters for part in pair)


def test_cl100k_cuts_telugu_at_vowel_signs_and_o200k_does_not() -> None:
    """Every cut is before a vowel sign, and there is one before each; a word without them is whole."""
    for _ in range(100):
        word = telugu_word(random.randint(1, 8), random.choice([0, 0.5, 1]))
        pieces = [piece.decode() for piece in pre_tokens(word, "cl100k")]
        signs = sum(letter in VOWEL_SIGNS for letter in word)
        assert len(pieces) == 1 + signs
        assert all(piece[0] in VOWEL_SIGNS for piece in pieces[1:])
        assert pre_tokens(word, "o200k") == [word.encode()]


def test_digits_are_grouped_in_threes_or_not() -> None:
    digits = "".join(random.choices("0123456789", k=random.randint(4, 20)))
    threes = [digits[i : i + 3].encode() for i in range(0, len(digits), 3)]
    assert pre_tokens(digits, "cl100k") == pre_tokens(digits, "o200k") == threes
    assert pre_tokens(digits, "gpt2") == pre_tokens(digits, "none") == [digits.encode()]


def test_a_vocabulary_of_bytes_reads_no_text() -> None:
    def unread() -> Iterator[str]:
        raise AssertionError("read")
        yield ""

    made = train(unread(), 258, special=["<a>", "<b>"])
    assert made.n_vocab == 258
    assert made.encode("é<a>") == [bpe.vocabulary([])[byte.to_bytes()] for byte in "é<a>".encode()]
    assert made.encode("<b>", special=True) == [257]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_transformers_and_a_gguf_file_have_the_same_tokens(pattern: str, tmp_path: Path) -> None:
    named = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "bos_token": "<|begin|>", "mask_token": "<|mask|>"}
    train([some_text()], 320, pattern=pattern, special=["<x>"], roles=named).save(tmp_path)
    made, theirs = Tokenizer.from_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert made.n_vocab == len(theirs) == 320
    assert [made.token(id_) for id_ in made.special_tokens] == ["<x>", *named.values()]
    assert ([*made.eos_ids], made.bos_id) == ([theirs.eos_token_id], theirs.bos_token_id)
    assert {role: getattr(theirs, role) for role in named} == named
    for text in SAMPLES.values():
        ids = made.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ids == made.encode(text, wrap=True)
        assert theirs.decode(ids) == text == made.decode(ids)
    if pattern != "none":  # GGUF has no name for it
        keys = tokenizer_keys(made, tmp_path / "tokenizer.json", 320)
        assert len(keys["tokenizer.ggml.tokens"]) == 320


def test_special_tokens_are_not_learned_from() -> None:
    plain = some_text()
    marked = plain.replace(" ", " <|end|> ")
    pieces = [piece for part in marked.split("<|end|>") for piece in pre_tokens(part, "gpt2")]
    made = train([marked], 300, special=["<|end|>", "<|end|>x"])
    wanted = [*bpe.vocabulary(bpe.learn(bpe.words_of(pieces), 298))]
    assert [made.spelled(made.token(id_) or "") for id_ in range(298)] == wanted
    assert not any(b"|" in token and len(token) > 1 for token in wanted)


@pytest.mark.parametrize(
    ("size", "settings", "said"),
    [
        (255, {}, r"vocab_size: must be 256 \(256 bytes and 0 special tokens\) to 1,048,576, got 255"),
        (257, {"special": ["<a>", "<b>"]}, r"must be 258 \(256 bytes and 2 special tokens\)"),
        (2**21, {}, "must be 256 .* to 1,048,576"),
        (300, {"pattern": "gpt-2"}, "pattern: must be gpt2, cl100k, o200k or none, got 'gpt-2'; did you mean 'gpt2'"),
        (300, {"special": [""]}, "special: must be printable"),
        (300, {"special": ["a b"]}, "special: must be printable"),
        (300, {"special": ["q"]}, "special: spelled like a token that was learned .got 'q'"),
        (300, {"roles": {"end_token": "<a>"}}, "roles: must be eos_token"),
        (300, {"min_count": 0}, "min_count: must be at least 1"),
    ],
    ids=str,
)
def test_refused(size: int, settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        train([some_text()], size, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [1, 2])
def test_more_tokens_than_the_text_allows(least: int) -> None:
    """What is named as reached is what can be reached."""
    text = some_text(30)
    most = 256 + len(bpe.learn(bpe.words_of(pre_tokens(text, "gpt2")), 10**6, min_count=least)) + 1
    with pytest.raises(InputError, match=f"at most {most:,}.; give more text"):
        train([text], most + 1, special=["<e>"], min_count=least)
    assert train([text], most, special=["<e>"], min_count=least).n_vocab == most


@pytest.mark.parametrize(("texts", "said"), [([], "texts: empty"), ([""], "texts: empty"), (["a\ud800b"], "surrogate")])
def test_texts_that_teach_nothing(texts: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        train(texts, 300)


def test_what_reading_raises_is_raised() -> None:
    def read() -> Iterator[str]:
        yield some_text()
        raise InputError("broken", field="line 2")

    with pytest.raises(InputError, match="line 2: broken"):
        train(read(), 300)


def test_bytes_per_token_of_bytes_are_one() -> None:
    """And one trained on the text has as many as its tokens."""
    plain, text = train([], 256), some_text()
    better = train([text], 320)
    rows = compare([plain, better], {"mine": text, "other": "é"})
    assert [row.bytes for row in rows] == [len(text), 2]
    assert rows[0].bytes_per_token == (1.0, len(text) / len(better.encode(text)))
    assert rows[0].change == (0.0, len(better.encode(text)) / len(text) - 1)
    assert rows[1].bytes_per_token == (1.0, 1.0)
    assert [row.kind for row in compare([plain])] == [*SAMPLES]
    with pytest.raises(InputError, match="nothing: empty"):
        compare([plain], {"nothing": ""})


def test_what_a_cut_refuses(trained: Tokenizer) -> None:
    with pytest.raises(InputError, match="TEXT: too long"):
        cut(trained, "a" * (2**16 + 1))
    words = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="does not merge pairs"):
        cut(Tokenizer(words), "a")
    assert cut(trained, "") == []


def test_a_cut_with_added_tokens_and_whole_words() -> None:
    """Tokens that are matched before all else, and words that are looked up before merging."""
    made = tokenizers.Tokenizer(
        models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "aba": 3}, merges=[("a", "b")], ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens(["<x>", "<xy>"])
    cuts = cut(Tokenizer(made), "aba<xy>ab abab<x>")
    assert [(one.piece, one.tokens, one.whole) for one in cuts] == [
        ("aba", ("aba",), True),
        ("<xy>", ("<xy>",), True),
        ("ab", ("ab",), True),
        ("abab", ("ab", "ab"), False),
        ("<x>", ("<x>",), True),
    ]
    made.normalizer = tokenizers.normalizers.Lowercase()
    assert [one.tokens for one in cut(Tokenizer(made), "AB")] == [("ab",)]
    assert Counter(one.whole for one in cuts) == {True: 4, False: 1}
