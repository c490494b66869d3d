"""Files that a person names: pipes, devices, folders and large files are refused, and JSON beyond its bounds."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from asbuilt.errors import InputError
from asbuilt.files import (
    open_regular,
    parse_json,
    read_json,
    read_object,
    read_regular,
    read_text,
    require_regular,
    stays_within,
)


def test_a_file_of_just_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    assert read_regular(file, 3) == b"abc"
    assert require_regular(file).st_size == 3
    with pytest.raises(InputError, match=r"gpu: too large .*at most 2 bytes"):
        read_regular(file, 2, "gpu")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_regular(link, 3) == b"abc"


@pytest.mark.parametrize("make", ["pipe", "folder", "absent", "null", "zero"])
def test_what_is_no_regular_file_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    monkeypatch.chdir(tmp_path)  # messages cut what is longer than a screen's line
    path = {"null": Path("/dev/null"), "zero": Path("/dev/zero")}.get(make, Path(make))
    if make == "pipe":
        os.mkfifo(path)  # reading it would wait for ever
    elif make == "folder":
        path.mkdir()
    for read in (lambda: read_regular(path, 9, "gpu"), lambda: require_regular(path, "gpu")):
        with pytest.raises(
            InputError, match="cannot be read" if make == "absent" else "(is a folder|is a pipe|must be a regular file)"
        ) as refused:
            read()
        assert refused.value.field == "gpu"
        assert str(path) in str(refused.value)
    with pytest.raises(InputError) as refused:
        read_regular(path, 9)
    assert refused.value.field == str(path)


def test_a_null_byte_in_the_name_and_a_sparse_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_regular(Path("a\0b"), 9)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(InputError, match="too large"):
        read_regular(sparse, 1 << 20)


def test_a_socket_and_a_link_to_a_pipe_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name in ("link", "socket"):
            with pytest.raises(InputError, match=r"(is a folder|is a pipe|must be a regular file)"):
                open_regular(tmp_path / name)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x")
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(InputError, match="secret: cannot be read: Permission denied"):
        open_regular(file)


def test_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é".encode())
    assert read_text(tmp_path / "a", 2) == "é"
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="not UTF-8: invalid start byte at byte 2"):
        read_text(tmp_path / "a", 10)


def test_json_is_read_as_json_is(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, True, None, "é😀"], "b": {"c": 10**63}}
    (tmp_path / "a").write_text(json.dumps(value))  # in which é is \u00e9 and 😀 a surrogate pair
    assert read_json(tmp_path / "a", 1000) == value
    assert read_object(tmp_path / "a", 1000) == value
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(InputError, match=r"must be a JSON object, got \[1\]"):
        read_object(tmp_path / "a", 10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "duplicate key: 'a'"),
        ('[{"b": {"a": 1, "b": 2, "b": 3}}]', "duplicate key: 'b'"),
        ("[NaN]", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("1e999", "1e999 is not a finite number"),
        ("1" * 65, "a number is too long"),
        ("-" + "1" * 5000, "a number is too long"),
        ("[" * 65 + "]" * 65, "nested too deeply \\(must be at most 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply \\(must be at most 64 levels"),
        ("[" * 100_000, "nested too deeply"),
        ('"\\ud800"', "a string has a lone surrogate"),
        ('{"\\udfff": 1}', "a string has a lone surrogate"),
        ("{", "not JSON: "),
        ("", "not JSON: "),
        ("[" + "0," * 11 + "0]", r"holds too many values \(got 13; must be at most 12\)"),
    ],
)
def test_json_beyond_its_bounds_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^here: {said}"):
        parse_json(text, "here", most_values=12 if "0,0" in text else 1 << 20)


def test_json_within_its_bounds_is_read() -> None:
    assert parse_json("1" * 64, "here") == int("1" * 64)
    assert parse_json("[" * 63 + "1" + "]" * 63, "here")
    assert parse_json("[" * 64 + "]" * 64, "here")
    assert parse_json("[0,0]", "here", most_values=4) == [0, 0]
    assert parse_json('[Infinity, 1e999, {"a": 1, "a": 2}]', "here", finite=False, unique=False) == [
        float("inf"),
        float("inf"),
        {"a": 2},
    ]


def test_links_out_of_a_folder_are_seen_and_those_of_the_hubs_cache_are_not_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "passwd").write_text("x")
    (folder / "a").write_text("x")
    (folder / "b").symlink_to("a")
    (folder / "c").symlink_to("../passwd")
    assert [stays_within(folder / name, folder) for name in "abc"] == [True, True, False]
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "12ab", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00").write_text("x")
    (snapshot / "a").symlink_to("../../blobs/f00")
    (snapshot / "c").symlink_to("../../../passwd")
    assert [stays_within(snapshot / name, snapshot) for name in "ac"] == [True, False]
