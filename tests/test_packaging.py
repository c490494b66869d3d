"""What is packaged: the package, and nothing that needs what is left out."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_source_distribution_is_the_package_alone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src" / "asbuilt" / "spec").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in (
        "src/asbuilt/__init__.py",
        "src/asbuilt/py.typed",
        "src/asbuilt/spec/__init__.py",
        "tests/test_docs.py",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    script = "from setuptools.build_meta import build_sdist; build_sdist('.')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if ".egg-info" not in name} == {
        "",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "src",
        "src/asbuilt",
        "src/asbuilt/__init__.py",
        "src/asbuilt/py.typed",
        "src/asbuilt/spec",
        "src/asbuilt/spec/__init__.py",
    }
