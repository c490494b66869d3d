"""Renders chat templates in a separate process, because a template is an untrusted program.

Fuel stops endless loops, but not a join that allocates all memory at once; that kills only this process
(`asbuilt.text.worker`), which `asbuilt.text.chat` calls.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import minijinja

from asbuilt.text.template_python import FILTERS, GLOBALS, TESTS, python_calls
from asbuilt.text.worker import serve

FUEL = 10_000_000  # steps, and part of the bytes that filters and joins build
# transformers marks the assistant's text with this tag; its contents are rendered as usual.
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def _tojson(value: Any, indent: int | None = None, **how: Any) -> str:  # noqa: ANN401
    """Writes JSON as in transformers' templates: unlike in Jinja's own filter, `<` and `é` are not escaped."""
    allowed = {"ensure_ascii": False, "sort_keys": False, "separators": None} | how
    return json.dumps(value, indent=indent, **allowed)


def _raise(message: str) -> None:
    raise ValueError(f"the template raised: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> minijinja.Environment:
    environment = minijinja.Environment(
        trim_blocks=True, lstrip_blocks=True, fuel=FUEL, auto_escape_callback=lambda _: False
    )
    for name, function in (FILTERS | {"tojson": _tojson}).items():
        environment.add_filter(name, function)
    for name, function in (GLOBALS | {"raise_exception": _raise, "strftime_now": _now}).items():
        environment.add_global(name, function)
    for name, test in TESTS.items():
        environment.add_test(name, test)
    return environment


def _answer(request: dict[str, Any]) -> str:
    source = GENERATION.sub(lambda m: f"{{%{m[1]} {m[2] or ''}with {m[3]}%}}", request["template"])
    try:
        text = _environment().render_str(python_calls(source), **request["context"])
    except MemoryError:
        raise
    except Exception as error:
        said = str(error).split("\n", 1)[0]  # the line and the error, without the source excerpt below
        raise ValueError(
            "the template crashed the engine or exceeded its memory limit" if said.startswith("panic") else said
        ) from error
    if len(text) > request["max_chars"]:
        raise ValueError(f"the template wrote {len(text)} characters; at most {request['max_chars']} are allowed")
    return text


def main() -> None:
    """Answers requests until the input closes."""
    serve(_answer)
