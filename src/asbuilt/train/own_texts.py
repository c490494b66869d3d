"""Texts that Python brings with it, so that a recipe needs no download: `data.text=python:sources` and others.

They are those of the Python that runs: another version's differ a little.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from asbuilt.text.sources import JSON_LINES

SOURCES, TOPICS, DOCSTRINGS = "python:sources", "python:topics", "python:docstrings"
NAMES = (SOURCES, TOPICS, DOCSTRINGS)
PAIR = ("source", "target")  # the keys of a pair in a line of JSON
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")
LARGEST = 1 << 20  # characters of a module; larger ones are tables
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
WORDS = 4  # fewest words of a sentence

Texts = Iterable[str]


def files(name: str, folder: Path) -> list[str]:
    """Returns the files of a text by its name; what is not a file yet is written into `folder` as JSON lines."""
    if name == SOURCES:
        return [str(path) for path in modules()]
    lines = ({"text": one} for one in sentences()) if name == TOPICS else documented()
    path = folder / f"{name.replace(':', '-')}{JSON_LINES}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        os.replace(fresh, path)
    return [str(path)]


def modules() -> list[Path]:
    """Returns the modules of the standard library in UTF-8, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*.py") if not set(path.relative_to(root).parts) & set(LEFT_OUT))
    return [path for path in found if _is_text(path)]


def _is_text(path: Path) -> bool:
    data = path.read_bytes()
    try:
        return bool(data.strip()) and len(data.decode()) <= LARGEST and b"\0" not in data
    except UnicodeDecodeError:
        return False


def sentences() -> Iterator[str]:
    """Yields the sentences of Python's documentation topics (`pydoc_data.topics`), without code and tables."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            plain = " ".join(paragraph.split())
            if "   " in paragraph.strip() or "::=" in plain or ">>>" in plain:
                continue
            yield from (one for one in SENTENCE.split(plain) if len(one.split()) >= WORDS and one[-1] in ".!?")


def documented() -> Iterator[dict[str, str]]:
    """Yields pairs: the first line of a function's documentation in the standard library, and the function's name."""
    for path in modules():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (said := ast.get_docstring(node)):
                first = said.split("\n")[0].strip()
                if len(first.split()) >= WORDS:
                    yield dict(zip(PAIR, (first, node.name), strict=True))
