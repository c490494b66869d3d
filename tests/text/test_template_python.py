"""What templates take from Python, rendered beside Jinja itself, in the sandbox that transformers puts it into."""

# ruff: noqa: E501, UP031  templates hold braces and signs of percent, and are easier read in one line

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asbuilt.errors import InputError
from asbuilt.text.chat import render
from asbuilt.text.template_python import OF_STRINGS, python_calls
from asbuilt.text.template_worker import _answer

TEXTS = ("  Hello, World's\n end ", "", "éẞ ab-ab_AB", "x-y-z")
SAID: dict[str, Any] = {"l": [3, 1, 2, 1], "d": {"b": 1, "a": [1], "t": "k-v"}, "n": 7, "n_": 7, "f": 2.5, "z": None}

CALLS = [
    "title()",
    "capitalize()",
    "swapcase()",
    "casefold()",
    "strip()",
    "lstrip('",
    "H')",
    "rstrip()",
    "split()",
    "split(none,1)",
    "split('-')",
    "split(sep='-')",
    "split(sep='l',maxsplit=1)",
    "rsplit()",
    "rsplit('-',1)",
    "rsplit('-',maxsplit=1)[0]",
    "rsplit('-',1)[-1].strip()",
    "splitlines()",
    "splitlines(true)",
    "startswith('",
    "H')",
    "startswith(('x','",
    "H'))",
    "endswith('end\\x20')",
    "find('o')",
    "find('o',7)",
    "rfind('-')",
    "index('-')",
    "rindex('-')",
    "count('l')",
    "count('l',3)",
    "partition('-')",
    "partition('-')[2]",
    "rpartition('-')[0]",
    "removeprefix('x-')",
    "removesuffix('-z').upper()",
    "zfill(30)",
    "ljust(30)",
    "ljust(30,'.')",
    "rjust(30)",
    "center(31,'*')",
    "isdigit()",
    "isdecimal()",
    "isalpha()",
    "isspace()",
    "istitle()",
    "isidentifier()",
    "isprintable()",
    "expandtabs(4)",
    "format(1)",
    "replace('-','+',1)",
    "join(['a','b'])",
    "upper().lower()",
]

EXPRESSIONS = [
    # the remainder and the text filled in, and what binds tighter or looser
    "'%s-%d' % ('a', 3)",
    "'%05.2f' % f",
    "n % 3",
    "'%s' % s",
    "'%s' % l",
    "'%(b)s' % d",
    "'%d%%' % n",
    "2 * n % 3",
    "n % 3 * 2",
    "n % 4 % 2",
    "-n % 4",
    "n % -4",
    "n + n % 3",
    "n % 3 + n",
    "n % 3 == 1",
    "(n|abs) % 3",
    "(n % 3) % 2",
    "n ** 2 % 5",
    "[n % 3, n % 2]",
    "{'a': n % 2}['a']",
    "l[n % 3]",
    "'a %s b' % ('x' if n else 'y')",
    "'%s' % d.t",
    "'%s' % 'a'.upper()",
    "'%s%s' % ('a','b') ~ 'c'",
    "n%2",
    "n%-2",
    "not n % 7",
    "n % 2 and 'x' or 'y'",
    "'a' if n % 2 else 'b'",
    "1 if z is not none and n % 2 else 0",
    "n / 2 % 2",
    "n // 2 % 2",
    "'x%sx' % n % ()",
    # receivers
    "l.index(1)",
    "l.count(1) - 1",
    "d.copy()",
    "l.copy()[0]",
    "(1,2).index(2)",
    "('a' ~ 'b-c').split('-')[1:]",
    "{'k':'a-b'}.k.partition('-')[2]",
    "d.get('q', 'x-y').count('-')",
    "d['t'].rsplit('-')[0].zfill(4) ~ '|'",
    "'a'.join(['b'.rjust(3), 'c'.title()])",
    "s.strip().rsplit(',', 1)[0].upper()|trim ~ 'q'",
    "'a-b'.rsplit('-')|join(',')",
    "'a b'.split()[0].ljust(4) ~ '|'",
    "'x'.center( 5 )",
    "'a.rsplit(x)'",
    '"it\'s".title()',
    "{'a':{'b':{}}}",
    "'b' in 'a-b'.rsplit('-')",
    "{'a':{'b':'x-y'}}['a']['b'].rsplit('-')[0]",
    "not s.startswith('a')",
    "s.startswith('  ') and s.endswith('q')",
    "['a-b'.split('-')]",
    "'{} {x} {0}'.format(1, x=2)",
    "'{0[0]}'.format(l)",
    "'{:>5}|'.format('a')",
    "'x-y'[0:2].partition('-')",
    # filters and tests
    "s is sequence",
    "l is sequence",
    "d is sequence",
    "n is sequence",
    "'12'|int + 1",
    "'q'|int(7)",
    "'0x1a'|int(base=16)",
    "2.7|int",
    "none|int",
    "s|wordwrap(5)",
    "s|truncate(10)",
    "'foo bar baz qux'|truncate(9, true)",
    "s|wordcount",
    "'foo bar baz qux'|truncate(11)",
    "'foo bar baz qux'|truncate(9)",
    "'foo'|center(9)",
    "'foo'|center",
    "'foo bar baz qux'|truncate(9, end='')",
    # what is cut without being told how: at 255 letters and five more, lines at 79, and at hyphens
    "('x ' * 130)|truncate",
    "('x ' * 130 ~ 'y')|truncate",
    "('xy ' * 99)|truncate(length=200, leeway=90)",
    "('ab ' * 60)|wordwrap",
    "'aaa-bbb-ccc dd'|wordwrap(5)",
    "'abcdefgh ij'|wordwrap(5)",
    "'abcdefgh ij'|wordwrap(5, false)",
    "'abc-defgh ij'|wordwrap(5, false, '|', false)",
    "'a\\tbc d\\n\\ne'|wordwrap(4)",
    "'q'|int",
    "'0b11'|int(7, 2)",
    "'1e3'|int",
    "'inf'|int(3)",
    "'12'|int(base=5)",
    "[]|int(4)",
    "'it\\'s'|e",
    "'a,b c'|wordcount",
    # names that end in an underscore, and signs behind what is a value already
    "n_ - 4 % 3",
    "l[0] - 4 % 3",
    "(n) - 4 % 3",
    "7 - 4 % 3",
    "n + 4 % 3",
    "{'a': 7}.a - 4 % 3",
    "- n % 4",
    "(-n) % 4",
    "[-n % 4]",
    "n * -2 % 5",
    "n if n is odd else 1 % 2",
    "s|e",
    "'<a href=\"x\">'|escape",
    "d|tojson(indent=2)",
    "l|tojson(separators=(',', ':'))",
    "'é'|tojson(ensure_ascii=true)",
    "{'b':1,'a':2}|tojson(sort_keys=true)",
    # refused
    "l.append(3)",
    "d.update({})",
    "d.pop('b')",
    "l.sort()",
    "'x'.split('a').pop()",
    "z.rsplit('a')",
    "n.rsplit('a')",
    "s.nosuch()",
    "'%d' % 'a'",
    "l.index(9)",
    "'a'.index('b')",
    "cycler()",
]

WHOLE = [
    "{% if loop is not defined and n % 2 == 1 %}{{ 'x%sx' % n }}{% elif n % 3 %}b{% endif %}",
    "{% set k = n % 3 %}{{k}}",
    "{% for a in l if a % 2 %}{{ a }}{% endfor %}",
    "{%if n%2%}a{%endif%}",
    "{{- n % 2 -}} {%- set a = n%2 -%}{{a}}",
    "{% macro f(a) %}{{ a.partition('-')[0] }}{% endmacro %}{{ f('x-y').zfill(4) }}",
    "{% set in_ = n % 3 %}{{ in_ - 4 % 3 }}",
    "{% if n %}{{ n % 2 }}{% else %}a{% endif %}{% for a in [n % 2, 'a-b'.rsplit('-')] %}{{ a }}{% endfor %}",
    "{%- if ('a' in s.split(' ')) or 'b'.isdecimal() -%} q {%- else -%} r {%- endif -%}",
    "{# x.rsplit( #}{% raw %}{{ a.rsplit('b') % 3 }}{% endraw %}{{ 'a'.rjust(3) }}",
    "{% set c = cycler('a','b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}",
    "{% set ns = namespace(x='a-b') %}{% set ns.x = ns.x.rsplit('-')[0] %}{{ ns.x }}",
    "{% set a, b, c = 'x-y'.partition('-') %}{{ a }}{{ c }}",
    "{% for p in 'a-b'.rsplit('-') %}{{ loop.index % 2 }}{{ p }}{% endfor %}",
    "{% set x %}a-b{% endset %}{{ x.rsplit('-')[1] }}",
    "{% with p = 'a-b'.partition('-') %}{{ p[0] }}{% endwith %}",
    "{% filter upper %}{{ 'a-b'.removeprefix('a') }}{% endfilter %}",
    "{{ '}}'.zfill(4) }}{{ \"%}\" % () }}",
]


@cache
def jinja() -> ImmutableSandboxedEnvironment:
    """As transformers makes it (`_compile_jinja_template`)."""
    import json

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def tojson(x: Any, ensure_ascii: bool = False, **how: Any) -> str:  # noqa: ANN401
        return json.dumps(x, ensure_ascii=ensure_ascii, **how)

    made.filters["tojson"] = tojson
    return made


def theirs(template: str, context: dict[str, Any]) -> str | None:
    try:
        return jinja().from_string(template).render(**context)
    except (TemplateError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def ours(template: str, context: dict[str, Any]) -> str | None:
    try:
        return render(template, [], named=context)
    except InputError:
        return None


def here(template: str, context: dict[str, Any]) -> str | None:
    """As `ours`, in this process."""
    try:
        return _answer({"template": template, "context": context, "max_chars": 10_000})
    except ValueError:
        return None


@pytest.mark.parametrize("call", CALLS)
def test_methods_of_strings(call: str) -> None:
    for text in TEXTS:
        context, template = SAID | {"s": text}, "{{ s.%s }}" % call
        assert ours(template, context) == here(template, context) == theirs(template, context)


@pytest.mark.parametrize("template", [*("{{ %s }}" % e for e in EXPRESSIONS), *WHOLE])
def test_expressions(template: str) -> None:
    context = SAID | {"s": TEXTS[0]}
    assert ours(template, context) == here(template, context) == theirs(template, context)


def test_all_methods_are_tried() -> None:
    tried = {call.partition("(")[0] for call in CALLS} | {"format"}
    assert OF_STRINGS - tried <= {"format_map"}


ATOMS = st.sampled_from(["n", "f", "3", "s", "'a-b'", "l", "d.t", "(n)", "'%s'", "l[0]", "[n, 2]", "z"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    call = st.sampled_from(
        ["rsplit('-')", "partition('-')", "index(1)", "zfill(4)", "split('-', 1)", "count('a')", "title()", "upper()"]
    )
    operator = st.sampled_from(["%", "*", "+", "-", "~", "//", "==", "and", "or", "in"])
    return st.one_of(
        st.builds("({}).{}".format, inner, call),
        st.builds("{} {} {}".format, inner, operator, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({}|string).{}".format, inner, call),
        st.builds("'%s' % ({})".format, inner),
    )


@given(st.recursive(ATOMS, _grown, max_leaves=6))
def test_drawn_expressions(expression: str) -> None:
    """Where Jinja gives a text, it is ours too; where minijinja has an order of its own (a list times a number), none."""
    template, context = "{{ %s }}" % expression, SAID | {"s": "x-y"}
    want, have = theirs(template, context), ours(template, context)
    assert have in (want, None)


def test_what_is_rewritten() -> None:
    assert python_calls("{{ 2 * n % 3 }}") == "{{ _percent(2 * n , 3 )}}"
    assert python_calls("a.rsplit('x') % b {{ m.a[0].rsplit('x') }}") == (
        "a.rsplit('x') % b {{ _call(m.a[0], 'rsplit', 'x') }}"
    )
    assert python_calls("{{ x.y.strip() }}{% if a.b() %}") == "{{ _call(x.y, 'strip') }}{% if a.b() %}"


@pytest.mark.parametrize(
    "broken", ["{{", "{% if", "{{ 'a", "{{ ) % ( }}", "{{ a.rsplit(", "{{ .rsplit(1) }}", "{{ % }}"]
)
def test_broken_templates_are_one_message(broken: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        render(broken, [])


@pytest.mark.parametrize("change", ["[1].append(2)", "[1].clear()", "{'a': 1}.update({'b': 2})", "{'a': 1}.pop('a')"])
def test_nothing_is_changed_in_place(change: str) -> None:
    with pytest.raises(InputError, match=r"would change a (list|dict) in place"):
        render("{{ %s }}" % change, [])


def test_attributes_are_not_formatted() -> None:
    """Jinja's sandbox leaves out what begins with underscores; no published template formats any."""
    with pytest.raises(InputError, match="attributes may not be formatted"):
        render("{{ '{0.__class__}'.format(1) }}", [])


BOMBS = {
    "wide": "{{ 'a'.ljust(10**10) }}",
    "wide by format": "{{ '%0999999999d' % 1 }}",
    "wide by braces": "{{ '{:>999999999}'.format(1) }}",
    "wide zeros": "{{ 'a'.zfill(2000000000) }}",
    "split": "{% set n = namespace(x='a-' * 1000) %}{% for i in range(99999) %}{% set n.x = n.x ~ n.x.rsplit('-') %}{% endfor %}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many calls": "{{ 'a'" + ".title()" * 100_000 + " }}",
    "many percents": "{{ 1" + " % 2" * 100_000 + " }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_one_message_and_the_next_works(name: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        render(BOMBS[name], [])
    assert render("{{ 'a-b'.rsplit('-')[1] }}", []) == "b"
