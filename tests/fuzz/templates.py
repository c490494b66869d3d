"""Mutated chat templates: each is rendered or refused with one message, within its budget.

`python tests/fuzz/templates.py --count 50000 --seed 1` cuts templates as published ones are written, those of the
tests among them, into pieces and puts them together anew. Prints what happened, and exits with 1 at the first that
escaped or took more than two seconds in all (the child is ended after 0.8 s of CPU time).
"""

# ruff: noqa: UP031  snippets of templates

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
sys.path.insert(0, str(Path(__file__).parent))
from running import run
from test_chat import CHAT, HOSTILE, TEMPLATES, TOOLS
from test_template_python import EXPRESSIONS, WHOLE

from asbuilt.errors import InputError
from asbuilt.text.chat import render

CUT = re.compile(r"(\{[%{#][-+]?|[-+]?[%}#]\}|\s+|[\w']+|.)", re.DOTALL)
SNIPPETS = [
    *("{{ %s }}" % e for e in EXPRESSIONS),
    "{% for a in range(99999) %}",
    "{% endfor %}",
    "{% if x %}",
    "{% endif %}",
    "{% set n = namespace(x='a') %}",
    "{% set n.x = n.x ~ n.x %}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "f(a)",
    "{%",
    "%}",
    "{{",
    "}}",
    "{#",
    "#}",
    "'",
    '"',
    "\\",
    "%",
    ".rsplit(",
    ".title()",
    "|",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "* 10**9",
    "~",
    "\x00",
    "\ud7ff",
    "é",
    "{% raw %}",
    "{% endraw %}",
    "{% generation %}",
    "{% endgeneration %}",
    "9" * 99,
]
STARTS = [*TEMPLATES.values(), *WHOLE, *(template for template, _ in HOSTILE.values() if len(template) < 300)]
CONTEXT: dict[str, Any] = {"s": "x-y", "l": [3, 1], "d": {"a": 1}, "n": 7, "f": 2.5, "z": None, "bos_token": "<s>"}


def drawn(draw: random.Random) -> str:
    """A template with one to six changes: pieces left out, said twice, moved, or put in from elsewhere."""
    pieces = CUT.findall(draw.choice(STARTS))
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        at = draw.randrange(len(pieces) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            del pieces[at : at + draw.choice((1, 1, 3, 20))]
        elif kind == 1:
            pieces[at:at] = pieces[at : at + draw.choice((1, 5, 20))] * draw.choice((1, 1, 1, 50))
        elif kind == 2:
            pieces.insert(at, draw.choice(SNIPPETS))
        elif kind == 3:
            other = CUT.findall(draw.choice(STARTS))
            start = draw.randrange(len(other))
            pieces[at:at] = other[start : start + draw.choice((3, 30))]
        elif pieces:
            pieces[at % len(pieces)] = draw.choice(SNIPPETS)
        pieces = pieces[:4000] or ["a"]
    return "".join(pieces)


def fuzz(count: int, seed: int) -> Counter[str]:
    """Runs `count` cases; raises AssertionError naming the case that broke the rule."""
    draw, outcomes = random.Random(seed), Counter[str]()
    for number in range(count):
        template = drawn(draw)
        case = f"case {number} of seed {seed}: {template[:3000]!r}"
        try:
            said = tried(template, draw)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} escaped from {case}") from error
        assert len(said) < 1000, case
        ended = "memory" in said or "CPU time" in said
        outcomes["rendered" if not said else "ended" if ended else "refused"] += 1
    return outcomes


def tried(template: str, draw: random.Random) -> str:
    """Returns what was said of the template, nothing where it was rendered."""
    try:
        render(template, CHAT, named=CONTEXT, tools=draw.choice((None, TOOLS)))
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run(fuzz, __doc__)
