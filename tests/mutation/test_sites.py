"""The errors that are tried: where they are put, and where they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sites import errors

SOURCES = sorted((Path(__file__).parents[2] / "src" / "asbuilt" / "cost").glob("*.py"))


def made(source: str) -> set[str]:
    return {error.applied(source.encode()).decode().strip() for error in errors(source.encode())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a + b", {"x = (a - b)", "x = a"}),
        ("x = max(a, b)", {"x = min(a, b)"}),
        ("x = 0.4", {"x = 0.8"}),
        ("x = 2", {"x = 3"}),
        ("x = 8", {"x = 9", "x = 4"}),
        ("x = a if b else c", {"x = (c if b else a)"}),
        ("x = not a", {"x = a"}),
        ("x = d['key']", {"x = d['keyx']"}),
        ("x += y", {"pass"}),
        ("raise ValueError(n - 1)", {"pass"}),
        ("x = -1  # é: two bytes", {"x = 1  # é: two bytes", "x = -2  # é: two bytes"}),
    ],
)
def test_an_error_of_each_kind(source: str, expected: set[str]) -> None:
    assert made(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Words: 1 + 1."""',
        "f'{a + b}'",
        "import a.b",
        "x: Literal['a', 'b']",
        "def f() -> 'A': ...",
        "@dataclass(frozen=True)\nclass A: ...",
        "@click.option('--name', help='a' + 'b')\ndef f(): ...",
    ],
)
def test_words_and_types_are_left_alone(source: str) -> None:
    assert made(source) == set()


def test_a_condition_is_negated_with_its_branches_kept() -> None:
    assert "if not (a):\n        x = b\n    else:\n        x = c" in "\n".join(
        made("def f():\n    if a:\n        x = b\n    else:\n        x = c")
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_each_differs_in_one_place_and_compiles(path: Path) -> None:
    source = path.read_bytes()
    for error in errors(source):
        mutated = error.applied(source)
        assert mutated != source
        compile(mutated, "mutated", "exec")
        assert mutated[: error.start] == source[: error.start]
        assert mutated.endswith(source[error.end :])
