"""Files that a person names: pipes, devices, folders and large files are refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asbuilt.errors import InputError
from asbuilt.files import read_regular, require_regular


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
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, make: str) -> None:
    path = {"null": Path("/dev/null"), "zero": Path("/dev/zero")}.get(make, tmp_path / make)
    if make == "pipe":
        os.mkfifo(path)  # reading it would wait for ever
    elif make == "folder":
        path.mkdir()
    for read in (lambda: read_regular(path, 9, "gpu"), lambda: require_regular(path, "gpu")):
        with pytest.raises(InputError, match="cannot be read" if make == "absent" else "not a file") as refused:
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
