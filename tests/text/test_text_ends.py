"""What begins and ends a text: hand-made folders, and the same ones read by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folders import added, around, tokenizer_json, write

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile
from asbuilt.generate.text import prompt_ids
from asbuilt.text.chat import encode_chat, render, turn_ends
from asbuilt.text.tokenizer import Tokenizer

# Behind the nine letters: the ids that the library gives them.
BOS, EOS, TURN, END, PLAIN = range(9, 14)
ONE = [{"role": "user", "content": "a"}]
TOKENS = [added(BOS, "<s>"), added(EOS, "</s>"), added(TURN, "<|turn|>"), added(END, "<|end|>")]
TOKENS.append(added(PLAIN, "<|plain|>", special=False))
IDS = {"<s>": BOS, "</s>": EOS}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
AROUND = {
    "nothing": None,
    "bos": around(["<s>", "$A"], {"<s>": BOS}),
    "eos": around(["$A", "</s>"], {"</s>": EOS}),
    "both": around(["<s>", "$A", "</s>"], IDS),
}
ADDS = {"bos": ([BOS], []), "eos": ([], [EOS]), "both": ([BOS], [EOS])}
CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", "GPTNeoXTokenizerFast")


def read(folder: Path, processor: str = "nothing", said: dict[str, Any] | None = None, **files: object) -> Tokenizer:
    made = tokenizer_json(added_tokens=TOKENS, post_processor=AROUND[processor])
    return Tokenizer.from_file(write(folder, made, tokenizer_config=NAMES if said is None else said, **files))


@pytest.mark.parametrize("class_", CLASSES)
@pytest.mark.parametrize("processor", AROUND)
def test_the_file_s_post_processor_rules_as_in_transformers(processor: str, class_: str | None, tmp_path: Path) -> None:
    """Whatever `add_bos_token` and `add_eos_token` say, which are of the time before tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = NAMES if class_ is None else NAMES | {"tokenizer_class": class_}
    for flag in (None, True, False):
        said = {} if flag is None else {"add_bos_token": flag, "add_eos_token": not flag}
        folder = tmp_path / str(flag)
        ours = read(folder, processor, config | said, config={"model_type": "llama"})
        before, behind = ADDS.get(processor, ([], [])) if class_ != "GPTNeoXTokenizerFast" else ([], [])
        assert ours.encode("abc", wrap=True) == prompt_ids(ours, "abc") == [*before, 0, 1, 2, *behind]
        assert ours.wrapped("abc") == (before, [0, 1, 2], behind)
        assert ours.wrapped("") == (before + behind, [], [])
        assert ours.add_bos is bool(before)
        assert ours.encode("abc") == [0, 1, 2]
        if flag and class_ != "GPT2Tokenizer":  # which has a table of its own for letters
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            assert theirs("abc")["input_ids"] == ours.encode("abc", wrap=True)


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_what_a_gguf_adds(pre: str, add_eos: bool | None, add_bos: bool | None) -> None:
    """Without a word, llama.cpp adds bos to Llama 3's kind and none to GPT-2's, and never eos."""
    keys: dict[str, object] = {
        "model": "gpt2",
        "tokens": ["a", "b", "<s>", "</s>", "<eot>", "<eom>"],
        "merges": [],
        "token_type": [1, 1, 3, 3, 3, 3],
        "pre": pre,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "eot_token_id": 4,
        "eom_token_id": 5,
    }
    keys |= {} if add_bos is None else {"add_bos_token": add_bos}
    keys |= {} if add_eos is None else {"add_eos_token": add_eos}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = Tokenizer.from_gguf(GGUFFile(path=Path("made"), metadata=metadata, tensors={}))
    bos = [2] if (pre == "llama-bpe" if add_bos is None else add_bos) else []
    assert prompt_ids(tokenizer, "ab") == [*bos, 0, 1, *([3] if add_eos else [])]
    assert tokenizer.add_bos is bool(bos)
    assert tokenizer.eos_ids == (3, 4, 5)
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_template_s_bos_is_not_doubled(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = read(tmp_path, "both", NAMES | {"chat_template": template})
    assert encode_chat(tokenizer, [{"role": "user", "content": "ab"}]) == [BOS, 0, 1, EOS]


ENDS: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "tokenizer": ({}, (EOS,)),
    "config": ({"config": {"eos_token_id": END}}, (EOS, END)),
    "a list": ({"config": {"eos_token_id": [EOS, END]}}, (EOS, END)),
    "generation": ({"generation_config": {"eos_token_id": [TURN]}}, (EOS, TURN)),
    "all": ({"config": {"eos_token_id": END}, "generation_config": {"eos_token_id": TURN}}, (EOS, TURN, END)),
    "text_config": ({"config": {"eos_token_id": END, "text_config": {"eos_token_id": [TURN]}}}, (EOS, END, TURN)),
    "null": ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, (EOS,)),
    "null over a number": ({"config": {"eos_token_id": END}, "generation_config": {"eos_token_id": None}}, (EOS, END)),
    "none": ({"config": {"eos_token_id": -1}}, (EOS,)),
    "beyond the table": ({"config": {"eos_token_id": 99}}, (EOS, 99)),
}


@pytest.mark.parametrize("case", ENDS)
def test_all_that_ends_a_text(case: str, tmp_path: Path) -> None:
    files, ends = ENDS[case]
    assert read(tmp_path, **files).eos_ids == ends  # type: ignore[arg-type]


def test_names_of_special_tokens(tmp_path: Path) -> None:
    """null is none, a missing name is the older file's, and a newer file takes no word from the older."""
    older = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<|end|>", "unk_token": "<unk>"}
    tokenizer = read(tmp_path / "a", said={"eos_token": "</s>"}, special_tokens_map=older)
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, (END,))
    newer = {"eos_token": "</s>", "bos_token": None, "added_tokens_decoder": {}, "image_token": "<i>"}
    tokenizer = read(tmp_path / "b", "bos", newer, special_tokens_map=older)
    assert tokenizer.named == {"eos_token": "</s>", "image_token": "<i>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (None, (EOS,), False)


def test_named_tokens_in_templates(tmp_path: Path) -> None:
    """Those that the model lacks are undefined, as in transformers, which prints nothing for them."""
    config = {
        "bos_token": None,
        "eos_token": "</s>",
        "pad_token": "<p>",
        "unk_token": {"__type": "AddedToken", "content": "<u>"},
    }
    template = "{{ pad_token }}{{ unk_token }}{{ cls_token }}{{ bos_token is defined }}{{ bos_token }}|{{ eos_token }}"
    read(tmp_path, said=config | {"chat_template": template})
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.chat_template is not None
    said = render(tokenizer.chat_template, ONE, named=tokenizer.named)
    assert said == "<p><u>False|</s>"
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(ONE, tokenize=False) == said


TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
OF_TURNS: dict[str, tuple[str | None, tuple[int, ...]]] = {
    "chatml": (TURNS, (END,)),
    "eos": ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", (EOS,)),
    "with a prompt": (TURNS + "{% if add_generation_prompt %}<|turn|>assistant{% endif %}", (END,)),
    # as gpt-oss: the end of the last answer is another token than that of what was said before
    "the last is another": (
        "{% for m in messages %}{{ m.content }}{{ '</s>' if loop.last else '<|end|>' }}{% endfor %}",
        (EOS,),
    ),
    "none behind the last": (
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|end|>{% endif %}{% endfor %}",
        (END,),
    ),
    "by what begins the next": ("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}", (TURN,)),
    "spaces between": ("{% for m in messages %}{{ m.content | trim }}\n <|end|>{% endfor %}", (END,)),
    "no control token": ("{% for m in messages %}{{ m.content }} <|plain|>{% endfor %}", (PLAIN,)),
    "control before other": ("{% for m in messages %}{{ m.content }}<|plain|></s>{% endfor %}", (EOS,)),
    "words": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ()),
    "by who speaks": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|end|>' if not loop.first }}{{ m.content }}"
        "{% elif m.role == 'assistant' %}{{ m.content }}{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        (END,),
    ),
    "a prompt that is not asked for": (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ '<|turn|>' if add_generation_prompt }}",
        (),
    ),
    "refuses": ("{{ raise_exception('no') }}", ()),
    "without answers": ("{{ messages[0].content }}<|end|>", ()),
    "no template": (None, ()),
}


@pytest.mark.parametrize("case", OF_TURNS)
def test_what_ends_an_answer(case: str, tmp_path: Path) -> None:
    template, ends = OF_TURNS[case]
    assert turn_ends(read(tmp_path, said=NAMES | {"chat_template": template})) == ends


def test_a_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools[0].x }}"}, {"name": "default", "template": "c"}]
    tokenizer = read(tmp_path, said=NAMES | {"chat_template": named})
    assert encode_chat(tokenizer, [{"content": "a"}]) == [2]
    assert encode_chat(tokenizer, [{"content": "a"}], tools=[{"x": "ab"}]) == [0, 1]
    only = read(tmp_path / "only", said=NAMES | {"chat_template": named[:1]})
    with pytest.raises(InputError, match="no chat template"):
        encode_chat(only, [{"content": "a"}])


def test_where_the_template_lies(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_json(), chat_template={"chat_template": "oldest"})
    assert Tokenizer.from_file(tmp_path).chat_template == "oldest"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "older"}))
    assert Tokenizer.from_file(tmp_path).chat_template == "older"
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert Tokenizer.from_file(tmp_path).chat_template == "newest"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    tokenizer = Tokenizer.from_file(write(tmp_path, tokenizer_json(truncation=cut, padding=fill)))
    assert tokenizer.encode("abcdef") == [0, 1, 2, 3, 4, 5]


def test_what_names_code_is_not_written_again(tmp_path: Path) -> None:
    config = NAMES | {"auto_map": {"AutoTokenizer": ["x.Y", None]}, "custom_code": "x", "kept": [1]}
    read(tmp_path / "read", said=config).save(tmp_path / "written")
    said = json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
    assert not {"auto_map", "custom_code"} & set(said)
    assert said["kept"] == [1]
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
