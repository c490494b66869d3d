"""Python features that published chat templates use and minijinja lacks: string and list methods, `%`, some filters.

Jinja hands a template's strings to Python, and templates use what strings can do there. minijinja knows the commonest
methods; calls of the others are rewritten to calls of a function, `a.b.rsplit('-', 1)[0]` to
`_call(a.b, 'rsplit', '-', 1)[0]`, and `a % b` to `_percent(a, b)`. What changes a list or dict in place is refused, as
transformers' sandbox refuses it.
"""

from __future__ import annotations

import html
import re
import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# minijinja's own methods that handle every argument as Python does are kept: strip, upper, replace, items ...
OF_STRINGS = frozenset(
    {
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "expandtabs",
        "find",
        "format",
        "format_map",
        "index",
        "isdecimal",
        "isidentifier",
        "isprintable",
        "istitle",
        "ljust",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "zfill",
    }
)
METHODS: dict[type, frozenset[str]] = {
    str: OF_STRINGS,
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    dict: frozenset({"copy"}),
}
CHANGING = frozenset(
    {
        "append",
        "clear",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    }
)
REWRITTEN = frozenset[str]().union(*METHODS.values(), CHANGING)

SKIPPED = r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
OPENING = re.compile(rf"(?P<skipped>{SKIPPED})|\{{\{{|\{{%", re.DOTALL)
TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<value>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\d+(?:\.\d+)?\w*)"
    r"|(?P<method>\.\s*(?P<called>[^\W\d]\w*)\s*\((?P<empty>\s*\))?)"
    r"|(?P<name>[^\W\d]\w*)"
    r"|(?P<end>[-+]?(?:%\}|\}\}))"
    r"|(?P<operator>\*\*|//|[=!<>]=|.)",
    re.DOTALL,
)
KEYWORDS = frozenset({"and", "or", "not", "in", "is", "if", "else", "elif", "for"})


@dataclass
class _Level:
    """Where in the output the current operand begins, and the chain of `* / // %` that it ends."""

    start: int = 0  # of the expression that these brackets belong to
    operand: int | None = None
    chain: int | None = None
    percent: bool = False  # the right side of a `%` is being read

    def finish(self, written: list[str]) -> None:
        if self.percent:
            written.append(")")
        self.percent = False

    def part(self, written: list[str]) -> None:
        self.finish(written)
        self.operand = self.chain = None


def python_calls(source: str) -> str:
    """Returns the template with Python's methods and `%` rewritten as calls; text outside expressions is unchanged."""
    written: list[str] = []
    at = 0
    while opening := OPENING.search(source, at):
        written.append(source[at : opening.end()])
        at = opening.end()
        if opening["skipped"] is None:
            inside: list[str] = []
            at = _rewrite(source, at, opening[0] == "{%", inside)
            written += inside
    return "".join([*written, source[at:]])


def _rewrite(source: str, at: int, statement: bool, written: list[str]) -> int:
    """Rewrites one expression or statement and returns the position of its end."""
    levels = [_Level()]
    last = "if" if statement else ""  # the previous token; a statement's own name is not an operand
    first = statement
    while found := TOKEN.match(source, at):
        level, text, kind = levels[-1], found[0], _kind(found)
        if kind == "end" and len(levels) > 1:  # braces of dicts
            text, kind = text[0], "operator"
        at += len(text)
        if kind == "space":
            written.append(text)
            continue
        if kind == "end":
            level.finish(written)
            return at - len(text)
        if found["method"] is not None and (found["called"] not in REWRITTEN or level.operand is None):
            at += 1 - len(text)
            text, kind = ".", "operator"
        if kind == "method":
            assert level.operand is not None
            written.insert(level.operand, "_call(")
            written.append(f", '{found['called']}'")
            if found["empty"] is not None:
                written.append(")")
                last = ")"
            else:
                written.append(", ")
                levels.append(_Level(start=level.operand))
                last = "("
            continue
        if kind == "name" and (first or text in KEYWORDS):
            level.part(written)
            written.append(text)
        elif kind in ("name", "value"):
            _operand(level, last, text, written)
        else:
            _operator(levels, last, text, written)
        first, last = False, text
    return at


def _kind(found: re.Match[str]) -> str:
    return next(kind for kind in ("space", "value", "method", "name", "end", "operator") if found[kind] is not None)


def _operand(level: _Level, last: str, text: str, written: list[str]) -> None:
    if last == ".":
        pass
    elif last in ("|", "is"):
        level.operand = None
    else:
        if _ends_operand(last):  # two adjacent words: `set x`
            level.part(written)
        level.operand = len(written)
        level.chain = level.operand if level.chain is None else level.chain
    written.append(text)


def _ends_operand(token: str) -> bool:
    return token != "" and token not in KEYWORDS and (token[-1] in ")]}'\"" or token[-1].isalnum() or token[-1] == "_")


def _operator(levels: list[_Level], last: str, text: str, written: list[str]) -> None:
    level = levels[-1]
    if text in ("(", "[", "{"):
        called = level.operand is not None and text != "{" and _ends_operand(last)
        start = level.operand if called and level.operand is not None else len(written)
        level.chain = start if level.chain is None else level.chain
        levels.append(_Level(start=start))
    elif text in (")", "]", "}"):
        level.finish(written)
        if len(levels) > 1:
            levels.pop()
            levels[-1].operand = level.start
    elif text == "%" and level.chain is not None:
        level.finish(written)
        written.insert(level.chain, "_percent(")
        level.percent, level.operand, text = True, None, ","
    elif text in ("*", "/", "//"):
        level.finish(written)
        level.operand = None
    elif text in ("**", "|", "."):
        level.operand = level.operand if text == "." else None
    elif text in ("-", "+") and not _ends_operand(last):
        level.chain = len(written) if level.chain is None else level.chain
    else:
        level.part(written)
    written.append(text)


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if "." in field_name:
            raise ValueError("attributes may not be formatted")
        return super().get_field(field_name, args, kwargs)


def call(value: Any, method: str, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
    """Returns the result of Python's method of this name."""
    if method in CHANGING and isinstance(value, (list, dict)):
        raise ValueError(f"{method} would change a {type(value).__name__} in place, which templates may not do")
    if method not in METHODS.get(type(value), ()):
        raise ValueError(f"unknown method: {type(value).__name__} has no method named {method}")
    if method in ("format", "format_map"):
        return _Formatter().vformat(value, arguments, arguments[0] if method == "format_map" else named)
    return getattr(value, method)(*arguments, **named)


def percent(left: Any, right: Any) -> Any:  # noqa: ANN401
    """Returns Python's `left % right`: a remainder, or a formatted string."""
    return left % right


class Cycler:
    """Jinja's `cycler`: iterates over its values in a loop."""

    def __init__(self, *values: Any) -> None:  # noqa: ANN401
        self._values, self._at = values, 0

    @property
    def current(self) -> Any:  # noqa: ANN401
        """The next value."""
        return self._values[self._at]

    def next(self) -> Any:  # noqa: ANN401
        """Returns the current value and advances."""
        value = self.current
        self._at = (self._at + 1) % len(self._values)
        return value

    def reset(self) -> None:
        """Restarts from the first value."""
        self._at = 0


def cycler(*values: Any) -> Cycler:  # noqa: ANN401
    """Returns a Cycler; raises ValueError without values."""
    if not values:
        raise ValueError("at least one item has to be provided")
    return Cycler(*values)


def to_int(value: Any, default: int = 0, base: int = 10) -> int:  # noqa: ANN401
    """Jinja's `int`: the integer, or the default if the value is not one."""
    try:
        return int(value, base) if isinstance(value, str) else int(value)
    except (TypeError, ValueError):
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default


def escape(value: Any) -> str:  # noqa: ANN401
    """Jinja's `escape`: escapes HTML's special characters."""
    return html.escape(str(value), quote=False).replace("'", "&#39;").replace('"', "&#34;")


def truncate(text: str, length: int = 255, killwords: bool = False, end: str = "...", leeway: int = 5) -> str:
    """Jinja's `truncate`: shortens the text to a length, at a space unless `killwords`."""
    if len(text) <= length + leeway:
        return text
    cut = text[: length - len(end)]
    return (cut if killwords else cut.rsplit(" ", 1)[0]) + end


def wordwrap(
    text: str, width: int = 79, break_long_words: bool = True, wrapstring: str = "\n", break_on_hyphens: bool = True
) -> str:
    """Jinja's `wordwrap`: wraps lines to a width."""
    lines = (
        wrapstring.join(
            textwrap.wrap(
                line,
                width=width,
                expand_tabs=False,
                replace_whitespace=False,
                break_long_words=break_long_words,
                break_on_hyphens=break_on_hyphens,
            )
        )
        for line in text.splitlines()
    )
    return wrapstring.join(lines)


GLOBALS: dict[str, Callable[..., Any]] = {"_call": call, "_percent": percent, "cycler": cycler}
FILTERS: dict[str, Callable[..., Any]] = {
    "int": to_int,
    "escape": escape,
    "e": escape,
    "center": lambda text, width=80: text.center(width),
    "wordcount": lambda text: len(re.findall(r"\w+", text)),
    "truncate": truncate,
    "wordwrap": wordwrap,
}
TESTS: dict[str, Callable[..., bool]] = {
    # strings and dicts too, since both have a length and can be indexed
    "sequence": lambda value: isinstance(value, (str, list, tuple, dict)),
}
