"""`asbuilt web` where it cannot start."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from asbuilt.cli.main import cli

MISSING = ("starlette", "uvicorn")


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in MISSING or name == "asbuilt.web.server"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing(MISSING), *sys.meta_path])
    found = CliRunner().invoke(cli, ["web", "--no-open"])
    assert found.exit_code == 2
    assert "which is not installed: pip install 'asbuilt[web]'" in found.stderr


def test_an_unknown_model_is_refused_before_anything_listens() -> None:
    assert CliRunner().invoke(cli, ["web", "no-such-model", "--no-open"]).exit_code == 2


class Refusing:
    """Finds none of these packages."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(name=name)
