"""Renders chat templates in a process of its own, because a template is a stranger's program.

Fuel ends endless loops, but not a join that asks for all memory at once, and such a request ends the process that makes
it. So this file is run as a script, under limits that the system enforces, and is asked by `asbuilt.text.chat`: a line
of JSON in, a line of JSON out, until its input closes. It imports nothing of asbuilt.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from datetime import datetime
from typing import Any

import minijinja

FUEL = 10_000_000  # steps, and a share of the bytes that filters and joins build
SECONDS = 5
MEMORY_BYTES = 1 << 29
# transformers marks what the assistant said with this tag; what it encloses is rendered all the same.
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def _tojson(value: Any, indent: int | None = None, **how: Any) -> str:  # noqa: ANN401
    """Writes JSON as transformers has its templates do: unlike Jinja's own, `<` and `é` stay as they are."""
    allowed = {"ensure_ascii": False, "sort_keys": False, "separators": None} | how
    return json.dumps(value, indent=indent, **allowed)


def _raise(message: str) -> None:
    raise ValueError(f"the template says: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> minijinja.Environment:
    environment = minijinja.Environment(
        trim_blocks=True, lstrip_blocks=True, fuel=FUEL, auto_escape_callback=lambda _: False
    )
    environment.add_filter("tojson", _tojson)
    environment.add_global("raise_exception", _raise)
    environment.add_global("strftime_now", _now)
    return environment


def _limit() -> None:
    """Limits memory; where the system knows no such limit (Windows, macOS), only fuel and time remain."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):
        return


def _answer(request: dict[str, Any]) -> dict[str, str]:
    source = GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", request["template"])
    try:
        text = _environment().render_str(source, **request["context"])
    except Exception as error:
        said = str(error).split("\n", 1)[0]  # the line and what failed; the excerpt of the source below is dropped
        return {"error": "the template broke the engine, or its memory limit" if said.startswith("panic") else said}
    if len(text) > request["max_chars"]:
        return {"error": f"the template wrote {len(text)} characters; allowed are {request['max_chars']}"}
    return {"text": text}


def main() -> None:
    """Answers until the input closes; SIGALRM and a failed allocation end the process, and the asker sees that."""
    _limit()
    alarm = getattr(signal, "alarm", lambda _: None)
    for line in sys.stdin:
        alarm(SECONDS)
        answer = json.dumps(_answer(json.loads(line)))
        alarm(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
