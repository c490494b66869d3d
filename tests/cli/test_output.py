"""How commands print: JSON that every reader takes, tables that break no number, and nothing lost without a word."""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from typing import Any

import pytest
from terminal import STYLE, OnTerminal, command_on_terminal

from asbuilt.cli import output

NOTED = re.compile(r"no room for .*: --json or a pipe shows all")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    return command_on_terminal(monkeypatch)


class TestJson:
    def printed(self, document: object, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> str:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        output.print_json(document)
        sys.stdout.flush()
        return raw.getvalue().decode(encoding)

    def test_what_is_no_number_is_null(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nan, inf = float("nan"), float("inf")
        said = self.printed({"a": nan, "b": [1.5, inf, [-inf, (nan, 2)]], "c": {"d": nan}}, monkeypatch)
        assert json.loads(said, parse_constant=pytest.fail) == {
            "a": None,
            "b": [1.5, None, [None, [None, 2]]],
            "c": {"d": None},
        }

    def test_texts_come_back_as_they_were_and_nothing_in_them_is_obeyed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        every = "|".join(
            map(
                chr,
                [*range(0x2100), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10000), 0x1F600, *range(0xE0000, 0xE0100)],
            )
        )
        said = self.printed({every: [every]}, monkeypatch)
        document = json.loads(said)
        assert document == {every: [every]}
        assert {unicodedata.category(c) for c in said if c != "\n"}.isdisjoint(("Cc", "Cf", "Cs", "Zl", "Zp"))

    def test_an_encoding_that_lacks_the_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for encoding in ("ascii", "latin-1", "cp1252"):
            assert json.loads(self.printed({"é→😀": "é→😀"}, monkeypatch, encoding)) == {"é→😀": "é→😀"}

    def test_one_space_for_each_level(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.printed({"a": [1, "é"]}, monkeypatch) == '{\n "a": [\n  1,\n  "é"\n ]\n}\n'
        assert self.printed({"a": [float("nan"), True]}, monkeypatch) == '{\n "a": [\n  null,\n  true\n ]\n}\n'
        assert self.printed(["é"], monkeypatch, "UTF-16-LE") == '[\n "é"\n]\n'

    def test_a_stream_that_names_no_encoding_gets_ascii(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        output.print_json("é")
        assert sys.stdout.getvalue() == '"\\u00e9"\n'  # type: ignore[attr-defined]

    def test_what_json_cannot_hold_is_a_fault_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TypeError):
            self.printed({"a": object()}, monkeypatch)


def test_ranges_and_shapes() -> None:
    assert output.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert output.ranges([3]) == "3"
    assert output.ranges([]) == ""
    assert (output.shape([4096, 14336]), output.shape([7]), output.shape(None)) == ("4096 x 14336", "7", "")


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("aa bb", 5, ["aa bb"]),
        ("aa bb", 4, ["aa", "  bb"]),
        ("aa bb cc dd", 6, ["aa bb", "  cc", "  dd"]),
        ("  aa bb cc", 8, ["  aa bb", "    cc"]),
        ("a abcdefghijkl", 8, ["a", "  abcdefghijkl"]),
        ("aa bbb-ccc", 8, ["aa", "  bbb-ccc"]),
        ("a\nb", 80, [r"a\nb"]),
        ("", 80, [""]),
    ],
)
def test_a_line_goes_on_below_where_a_terminal_is_narrower(
    text: str, columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between words, two further in; in a pipe it is one line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for stream, expected in ((Terminal(), "\n".join(lines)), (io.StringIO(), text.replace("\n", r"\n"))):
        monkeypatch.setattr(sys, "stdout", stream)
        output.say(text)
        assert stream.getvalue() == expected + "\n"


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", 0),
        ("ab", 2),
        ("é", 1),
        ("日本", 4),
        ("ａ", 2),
        ("日a", 3),
        ("e\u0301", 1),
        ("e\u0301\u0301", 1),
        ("a\u20dd", 1),
    ],
)
def test_cells_of_a_text(text: str, cells: int) -> None:
    assert output.cells_of(text) == cells


SENTENCE = "some words that go on and on"  # 28 characters


@pytest.mark.parametrize(
    ("name", "cells", "right", "widest", "least"),
    [
        ("n", [1, 22, 333], True, 3, 3),
        ("number of", [1, 2], True, 9, 6),  # a header is broken between its words
        ("n", [12_345, "", "-"], True, 6, 6),
        ("n", ["", "-"], False, 1, 1),
        ("n", ["5.0%", "-1.5", "1e-3", "+2", "−3"], True, 4, 4),
        ("n", ["5.0%", "abc"], False, 4, 4),
        ("n", ["5 GB", 3], False, 4, 4),
        ("n", [10**27], True, 37, 37),  # a figure is never broken
        ("n", [SENTENCE], False, 28, 28),
        ("n", [SENTENCE + "n"], False, 29, 20),
        ("n", ["a few words and abcdefghijklmnopqrstuvwxy"], False, 41, 25),
        ("n", ["x" * 40], False, 40, 28),
        ("n", ["x" * 40, "some"], False, 40, 28),
        ("a header of several words", ["x"], False, 25, 7),
        ("a " + "h" * 24, [SENTENCE + "n"], False, 29, 24),
        ("n", [], False, 1, 1),
    ],
)
def test_how_wide_a_column_may_be(name: str, cells: list[Any], right: bool, widest: int, least: int) -> None:
    made = output.measured(name, cells)
    assert (made.name, made.right, made.widest, made.least) == (name, right, widest, least)


def column(name: str, least: int, widest: int = 0, *, right: bool = False) -> Any:  # noqa: ANN401
    return output.Column(name=name, cells=(), right=right, widest=widest or least, least=least)


@pytest.mark.parametrize(
    ("room", "drop", "kept", "left_out"),
    [
        (36, (), "abcd", []),  # 10 + 8 + 6 + 6, and two between each
        (35, (), "abc", ["d"]),
        (28, (), "abc", ["d"]),
        (27, (), "ab", ["d", "c"]),
        (5, (), "ab", ["d", "c"]),  # never fewer than two
        (35, ("b",), "acd", ["b"]),
        (25, ("b",), "ac", ["b", "d"]),
        (5, ("c", "b"), "ad", ["c", "b"]),
        (35, ("e", "c"), "abd", ["c"]),
    ],
)
def test_which_columns_there_is_room_for(room: int, drop: tuple[str, ...], kept: str, left_out: list[str]) -> None:
    columns = [column("a", 10), column("b", 8), column("c", 6), column("d", 6)]
    found, names = output.fitting(columns, drop, room)
    assert ("".join(one.name for one in found), names) == (kept, left_out)


@pytest.mark.parametrize(
    ("columns", "room", "given"),
    [
        ([column("a", 10, 30), column("b", 10, 20)], 22, [10, 10]),
        ([column("a", 10, 30), column("b", 10, 20)], 23, [11, 10]),
        ([column("a", 10, 30), column("b", 10, 20)], 27, [15, 10]),  # until 30/15 is no more than 20/10
        ([column("a", 10, 30), column("b", 10, 20)], 29, [16, 11]),
        ([column("a", 10, 30), column("b", 10, 20)], 99, [30, 20]),
        ([column("a", 5), column("b", 5)], 99, [5, 5]),
        ([column("a", 10), column("b", 5, right=True)], 10, [3, 5]),  # text is broken, a figure never
        ([column("a", 10), column("b", 8)], 15, [6, 7]),
        ([column("a", 10), column("b", 8)], 19, [9, 8]),
        ([column("a", 3), column("b", 9, right=True)], 5, [1, 9]),
    ],
    ids=str,
)
def test_how_wide_columns_are_drawn(columns: list[Any], room: int, given: list[int]) -> None:
    assert output.widths(columns, room) == given


def test_a_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Ti\ntle", ("name", "n", "is"), [("日本", 1, "a"), ("e\u0301", 1234.5, ""), ("", "", "long")])
    assert capsys.readouterr().out == (
        "\nTi\\ntle\n  name        n  is\n  日本        1  a\n  e\u0301     1,234.5\n                 long\n"
    )
    output.table("Nothing", (), [])
    assert capsys.readouterr().out == "\nNothing\n"


def test_how_a_table_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The title and the names in bold, the note dim, no other colour, no markup and no picture."""
    monkeypatch.setenv("COLUMNS", "24")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    output.table("Title 7", ("name", "n", "note"), [("[red]a[/red]", 12, ":smile:"), ("b", 3, "x")], drop=("note",))
    text = stream.getvalue()
    assert text.split("\n")[:2] == ["", "\x1b[1mTitle 7\x1b[0m"]
    assert "\n[red]a[/red]  12\nb              3\n" in "\n".join(line.rstrip() for line in text.split("\n"))
    assert "\x1b[2mno room for note: --json" in text
    assert {*re.findall(r"\x1b\[[0-9;]*m", text)} == {"\x1b[0m", "\x1b[1m", "\x1b[2m"}


class TestTable:
    """One whose figures and words are known."""

    columns = ("path", "what it is", "number", "share", "")
    rows = ((f"blocks.{i}.attention", "a few words that may be broken", 10**9 + i, f"{i}.5%", "note") for i in range(3))

    @pytest.fixture
    def shown(self, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
        import click

        from asbuilt.cli.main import cli

        terminal = command_on_terminal(monkeypatch)

        def show(columns: int, table: Any, **more: Any) -> list[str]:  # noqa: ANN401
            @click.command()
            def drawn() -> None:
                output.table(*table, **more)

            monkeypatch.setattr(cli, "get_command", lambda *_: drawn)
            code, text = terminal("drawn", columns=columns)
            assert code == 0
            return STYLE.sub("", text).strip("\n").split("\n")

        return show

    @pytest.fixture
    def table(self) -> Any:  # noqa: ANN401
        rows = [
            (f"blocks.{i}.attention", "a few words that may be broken", 10**9 + i, f"{i}.5%", "note") for i in range(3)
        ]
        return "Title", self.columns, rows

    def test_what_there_is_room_for_is_one_line_each(self, shown: Any, table: Any) -> None:  # noqa: ANN401
        lines = shown(100, table)
        assert [line.rstrip() for line in lines] == [
            "Title",
            "path                what it is                             number  share",
            "─" * 78,
            *(
                f"blocks.{i}.attention  a few words that may be broken  1,000,000,00{i}   {i}.5%  note"
                for i in range(3)
            ),
        ]

    def test_words_are_broken_before_a_column_is_left_out(self, shown: Any, table: Any) -> None:  # noqa: ANN401
        lines = shown(72, table)
        assert not [line for line in lines if "no room" in line]
        assert "blocks.0.attention  a few words that may be   1,000,000,000   0.5%  note" in lines
        assert "                    broken" in [line.rstrip() for line in lines]

    def test_columns_are_left_out_from_the_right_or_as_told(self, shown: Any, table: Any) -> None:  # noqa: ANN401
        lines = shown(60, table)
        assert lines[-1] == "no room for notes, share: --json or a pipe shows all"
        assert "blocks.0.attention  a few words that may be    1,000,000,000" in [line.rstrip() for line in lines]
        lines = shown(60, table, drop=("what it is",))
        assert lines[-1].startswith("no room for what it is: ")
        assert "blocks.0.attention  1,000,000,000   0.5%  note" in [line.rstrip() for line in lines]

    def test_what_fits_exactly_fits(self, shown: Any, table: Any) -> None:  # noqa: ANN401
        """18 + 20 + 13 + 5 + 4 cells, and two between each."""
        assert "no room" not in "\n".join(shown(68, table))
        assert shown(67, table)[-1].startswith("no room for notes: ")
        assert "no room for notes, share, number" in " ".join(shown(40, table))

    def test_a_figure_longer_than_any_name_is_whole(self, shown: Any) -> None:  # noqa: ANN401
        lines = shown(50, ("Title", ("a", "b"), [("some words that may be broken anywhere", 10**27)]))
        assert f"{10**27:,}" in "\n".join(lines)

    def test_a_pipe_gets_figures_set_to_the_right(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.table("Title", ("a", "n", "share"), [("x", 1, "5.0%"), ("longer", 12_345, "")])
        assert capsys.readouterr().out == (
            "\nTitle\n  a            n  share\n  x            1   5.0%\n  longer  12,345\n"
        )

    def test_the_first_column_stays_and_no_number_is_broken(self, shown: Any, table: Any) -> None:  # noqa: ANN401
        for room in range(20, 40):
            text = "\n".join(shown(room, table, drop=("what it is", "share", "")))
            assert re.findall(r"1,000,000,00\d", text) == [f"1,000,000,00{i}" for i in range(3)]

    def test_no_rows_and_wide_characters(self, shown: Any) -> None:  # noqa: ANN401
        assert shown(40, ("Title", ("a", "b"), []))[0] == "Title"
        lines = shown(40, ("Title", ("name", "n"), [("日本語", 1), ("abc", 22)]))
        assert lines[-2:] == ["日本語   1", "abc     22"]


COMMANDS = [
    ("describe", "llama-3-8b"),
    ("describe", "deepseek-v3", "--seq", "128K"),
    ("models",),
    ("machines",),
    ("plan", "serve", "deepseek-v3", "--gpu", "h200", "--gpus", 8),
    ("plan", "serve", "llama-3-8b", "gpt2", "--gpu", "h100-sxm", "rtx-4090"),
    ("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", "--gpus", 64, "--tp", 4, "--zero", 3),
    ("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", "--gpus", 16, "--search"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(str, words)))
def test_no_figure_and_no_name_is_broken_at_80_and_60_columns(
    terminal: OnTerminal,
    run: Any,  # noqa: ANN401
    words: tuple[object, ...],
) -> None:
    """What is on a narrow terminal is what a pipe gets, word for word; what is not is named."""
    piped = run(*words)
    assert "no room" not in piped.stdout
    whole = {*piped.stdout.split()}
    assert not re.search(r"\de[+-]\d", piped.stdout)
    for columns in (80, 60):
        code, text = terminal(*words, columns=columns)
        assert code == piped.exit_code
        text = STYLE.sub("", text)
        assert max(map(len, text.split("\n"))) <= columns
        flat = NOTED.sub("", re.sub(r"\n(?=(and so|so|has|a|pipe|all|--json))", " ", text))
        broken = [word for word in flat.split() if word not in whole and set(word) != {"─"}]
        assert not [word for word in broken if re.search(r"\d,|,\d", word)], broken
    assert (terminal(*words, columns=500)[1].count("no room")) == 0
