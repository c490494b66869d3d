"""What a tokenizer is made of, each piece by hand: bytes of tokens, decoders, names, lengths, written files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from folders import added, tokenizer_json, write
from tokenizers import decoders, models, pre_tokenizers

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile
from asbuilt.text.pretokenizers import PRE_TOKENIZERS
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer, _decoder_kind, _token_bytes

REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTES, FALLBACK, FUSE, WORDS = ({"type": kind} for kind in ("ByteLevel", "ByteFallback", "Fuse", "WordPiece"))


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (None, None),
        (BYTES, "bytes"),
        (sequence(BYTES), "bytes"),
        (sequence(BYTES, FUSE), None),
        (sequence(REPLACE, FALLBACK, BYTES), None),
        (sequence(REPLACE, FALLBACK, FUSE), "metaspace"),
        (sequence(REPLACE, FALLBACK), "metaspace"),
        (sequence(REPLACE, FALLBACK, FUSE, STRIP), "metaspace-strip"),
        (sequence(REPLACE, FALLBACK, FUSE, WORDS), None),
        (sequence(REPLACE, FUSE), None),
        (sequence(FALLBACK, FUSE), None),
        (REPLACE, None),
        (WORDS, None),
        *(
            (sequence(REPLACE | change, FALLBACK), None)
            for change in ({"content": ""}, {"pattern": {"String": "_"}}, {"pattern": {"Regex": "▁"}})
        ),
        *(
            (sequence(REPLACE, FALLBACK, STRIP | change), None)
            for change in ({"content": "_"}, {"start": 0}, {"start": 2}, {"stop": 1})
        ),
    ],
    ids=str,
)
def test_which_decoders_put_bytes_side_by_side(decoder: dict[str, Any] | None, kind: str | None) -> None:
    assert _decoder_kind(decoder) == kind


@pytest.mark.parametrize(
    ("token", "kind", "written"),
    [
        ("Ġa", "bytes", b" a"),
        ("Ċ", "bytes", b"\n"),
        ("Ã©", "bytes", "é".encode()),
        ("<0x41>", "bytes", b"<0x41>"),
        ("a b", "bytes", b"a b"),
        ("é日", "bytes", "é日".encode()),
        ("日", "bytes", "日".encode()),
        ("▁a▁", "metaspace", b" a "),
        ("<0x41>", "metaspace", b"A"),
        ("<0xff>", "metaspace-strip", b"\xff"),
        ("<0xZZ>", "metaspace", b"<0xZZ>"),
        ("<0x4>", "metaspace", b"<0x4>"),
        ("<0x414>", "metaspace", b"<0x414>"),
        ("<0x41)", "metaspace", b"<0x41)"),
        ("(0x41>", "metaspace", b"(0x41>"),
        ("Ġ", "metaspace", "Ġ".encode()),
        ("abcdef", "metaspace", b"abcdef"),
        ("<1>", "metaspace", b"<1>"),
    ],
)
def test_bytes_of_a_token(token: str, kind: str, written: bytes) -> None:
    assert _token_bytes(token, kind) == written


def test_the_characters_of_bytes_are_gpt_2_s() -> None:
    """Those that print stand for themselves, all others come from U+0100 on, in the order of the bytes."""
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert BYTE_OF.keys() == {*pre_tokenizers.ByteLevel.alphabet()}
    known = {"!": 0x21, "~": 0x7E, "¡": 0xA1, "¬": 0xAC, "®": 0xAE, "ÿ": 0xFF, "Ā": 0, "Ġ": 0x20, "ġ": 0x7F, "Ń": 0xAD}
    assert {character: BYTE_OF[character] for character in known} == known


@pytest.mark.parametrize(
    ("said", "most"),
    [
        (None, None),
        (0, None),
        (1, 1),
        (-5, None),
        (4096, 4096),
        (2**31 - 1, 2**31 - 1),
        (2**31, None),
        (10**30, None),
        (True, None),
        (12.0, None),
        ("12", None),
    ],
)
def test_how_long_a_text_may_be(said: object, most: int | None, tmp_path: Path) -> None:
    config = {} if said is None else {"model_max_length": said}
    assert Tokenizer.from_file(write(tmp_path, tokenizer_json(), tokenizer_config=config)).max_tokens == most


def test_what_is_written(tmp_path: Path) -> None:
    """All of tokenizer_config.json, and over files that are there."""
    tokens = [added(9, "<é>"), added(10, "</s>")]
    config = {"bos_token": "<é>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "chat_template": "é"}
    tokenizer = Tokenizer.from_file(
        write(tmp_path / "read", tokenizer_json(added_tokens=tokens), tokenizer_config=config)
    )
    for _ in range(2):
        tokenizer.save(tmp_path / "out")
    assert (
        (tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8")
        == """{
  "clean_up_tokenization_spaces": false,
  "bos_token": "<é>",
  "tokenizer_class": "PreTrainedTokenizerFast",
  "add_bos_token": false,
  "chat_template": "é"
}"""
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]["b"] == 1
    config = {"clean_up_tokenization_spaces": True}
    Tokenizer.from_file(write(tmp_path / "plain", tokenizer_json(), tokenizer_config=config)).save(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said == config | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE()))
    assert tokenizer.n_vocab == 0
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        tokenizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_half_a_character_waits_for_its_other_half() -> None:
    """Of a decoder that only its library knows; what never becomes a character is U+FFFD in the end."""
    inner = tokenizers.Tokenizer(models.BPE({"<0xC3>": 0, "<0xA9>": 1, "a": 2}, []))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(inner)
    for ids, said, end in (((2, 0, 1), ["a", "", "é"], ""), ((2, 0), ["a", ""], "\ufffd")):
        stream = tokenizer.stream()
        assert [stream.push(id_) for id_ in ids] == said
        assert stream.finish() == end


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), AssertionError("ours"), SystemExit(3)], ids=repr)
def test_what_is_no_fault_of_the_input_passes(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])))

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(tokenizer._inner, "encode", fail)
    with pytest.raises(type(fault)) as caught:
        tokenizer.encode("a")
    assert caught.value is fault


def test_a_panic_of_the_library_in_this_process_is_a_message() -> None:
    charsmap = "BAAAAAAAAABhYmMA"  # a trie of four zero bytes, and texts behind it
    said = tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(said)), name="mine")
    with pytest.raises(InputError, match=r"mine: cannot read the text: .*out of bounds"):
        tokenizer.encode("abc")


# Vocabularies of GGUF files.


def gguf(**keys: Any) -> GGUFFile:  # noqa: ANN401
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if key != "template"}
    metadata |= {"tokenizer.chat_template": keys["template"]} if "template" in keys else {}
    return GGUFFile(path=Path("made"), metadata=metadata, tensors={})


def pieces(*tokens: str, **keys: Any) -> Tokenizer:  # noqa: ANN401
    """A SentencePiece vocabulary of these tokens behind the three usual ones."""
    tokens = ("<unk>", "<s>", "</s>", *tokens)
    types = [2, 3, 3, *[1] * (len(tokens) - 3)]
    usual = {"scores": [-float(i) for i in range(len(tokens))], "token_type": types}
    return Tokenizer.from_gguf(gguf(model="llama", tokens=list(tokens), **(usual | keys)))


def test_a_sentencepiece_file_that_names_nothing() -> None:
    """bos and a space in front of a text, no eos; what no token spells is one <unk>, however long it is."""
    tokenizer = pieces("▁", "a", "▁a")
    assert tokenizer.encode("a日本a", wrap=True) == [1, 5, 0, 4]
    assert tokenizer.encode("a a") == [5, 5]
    assert tokenizer.decode([5, 5]) == "a a"
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    plain = pieces("▁", "a", "▁a", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert plain.encode("a a", wrap=True) == [4, 5, 2]
    assert plain.decode([5, 5]) == " a a"


def test_names_of_a_gguf_s_special_tokens() -> None:
    tokenizer = pieces("a", "b", "c", "d", bos_token_id=3, eos_token_id=4, unknown_token_id=5, padding_token_id=6)
    assert tokenizer.named == {"bos_token": "a", "eos_token": "b", "unk_token": "c", "pad_token": "d"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (3, (4,))


def test_added_tokens_are_found_inside_words_and_as_they_are_spelled() -> None:
    """Control tokens where asked for, a user's own always, neither changed by what a space becomes."""
    types = [2, 3, 3, 1, 1, 1, 3, 4]
    tokenizer = pieces("▁", "a", "▁a", "<c d>", "<u v>", token_type=types)
    assert tokenizer.encode("a<c d>a<u v>a", special=True) == [5, 6, 5, 7, 5]
    assert tokenizer.decode([5, 6, 5, 7]) == "a a<u v>"
    assert tokenizer.is_special(6)
    assert not tokenizer.is_special(7)
    assert {id_: token.content for id_, token in tokenizer.added_tokens.items() if id_ > 2} == {6: "<c d>", 7: "<u v>"}


def test_the_best_score_is_joined_first() -> None:
    """`abc` is `ab` and `c`, or `a` and `bc`: whichever scores higher."""
    for scores, ids in (([-1.0, -2.0], [6, 5]), ([-2.0, -1.0], [3, 7])):
        tokenizer = pieces("a", "b", "c", "ab", "bc", scores=[0.0] * 6 + scores, add_space_prefix=False)
        assert tokenizer.encode("abc") == ids


@pytest.mark.parametrize("template", [3, ["a"], {"default": "a"}], ids=str)
def test_a_gguf_s_template_is_a_text(template: object) -> None:
    keys = {"model": "gpt2", "tokens": ["a"], "merges": []}
    assert Tokenizer.from_gguf(gguf(**keys)).chat_template is None
    assert Tokenizer.from_gguf(gguf(**keys, template="{{ x }}")).chat_template == "{{ x }}"
    with pytest.raises(InputError, match=r"tokenizer\.chat_template: must be a string"):
        Tokenizer.from_gguf(gguf(**keys, template=template))


def test_what_the_published_tokenizers_have() -> None:
    """By their own files: `ignore_merges`, a template with bos, and NFC are set in these and in no others."""
    llama3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
    has = {
        name: {n for n, pre in PRE_TOKENIZERS.items() if getattr(pre, name)}
        for name in ("ignore_merges", "add_bos", "nfc")
    }
    assert has == {"ignore_merges": llama3, "add_bos": llama3, "nfc": {"command-r", "qwen2", "deepseek-r1-qwen"}}
    assert PRE_TOKENIZERS.keys() == llama3 | has["nfc"] | {
        "default",
        "gpt-2",
        "gpt2",
        "phi-2",
        "olmo",
        "mpt",
        "exaone4",
        "smollm",
        "starcoder",
        "refact",
        "codeshell",
        "exaone",
        "minerva-7b",
        "dbrx",
        "smaug-bpe",
        "stablelm2",
        "gpt-4o",
        "llama4",
        "falcon",
        "bloom",
        "glm4",
        "chatglm-bpe",
        "deepseek-v3",
    }


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [3]), ("gpt-2", [0, 1])])
def test_a_piece_that_is_a_token_is_taken_whole_where_merges_are_ignored(pre: str, ids: list[int]) -> None:
    file = gguf(model="gpt2", tokens=["a", "b", "c", "ab"], merges=[], pre=pre)
    assert Tokenizer.from_gguf(file).encode("ab") == ids


def test_without_a_word_texts_are_cut_as_before_april_2024() -> None:
    """Digits by three and signs by themselves: `a`, ` `, `123`, `45`, `$`."""
    tokens = ["a", "Ġ", *"12345", "$", "12", "123", "34", "45", "Ġ1", "5$", "1234"]
    merges = ["1 2", "12 3", "3 4", "4 5", "Ġ 1", "5 $", "12 34"]
    tokenizer = Tokenizer.from_gguf(gguf(model="gpt2", tokens=tokens, merges=merges))
    assert [tokens[id_] for id_ in tokenizer.encode("a 12345$")] == ["a", "Ġ", "123", "45", "$"]
    assert not tokenizer.add_bos
