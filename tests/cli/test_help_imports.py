"""Help is printed without what it does not say: no models, families, planners, torch, or libraries other than click."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import asbuilt

HEAVY = (
    *(f"asbuilt.{name}" for name in ("api", "checkpoint", "cost", "description", "families", "generate", "measure")),
    *(f"asbuilt.{name}" for name in ("nn", "spec", "text", "train", "web", "catalog.models", "catalog.machines")),
    *("asbuilt.plan.serve.plan", "asbuilt.plan.train.plan", "asbuilt.plan.devices", "asbuilt.kernels.memory.registry"),
    *("numpy", "rich", "safetensors", "starlette", "tokenizers", "torch", "transformers"),
)
MOST = 40  # of asbuilt's own modules
CODE = """
import contextlib, io, json, sys
from asbuilt.cli.main import cli
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    cli.main(sys.argv[1:], prog_name="asbuilt")
print(json.dumps([said.getvalue(), sorted(sys.modules)]))
"""


def helped(*words: str) -> tuple[str, list[str]]:
    """What `--help` of a command prints, and the modules that are imported by then."""
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(asbuilt.__file__))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words, "--help"], env=env, check=True, capture_output=True, text=True
    )
    said, modules = json.loads(done.stdout)
    return said, modules


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("", "describe"),
        ("plan", "serve"),
        ("plan serve", "--bandwidth-efficiency"),
        ("plan train", "megatron-selective"),
        ("describe", "--seq"),
        ("train", "--resume"),
        ("generate", "--max-new-tokens"),
    ],
)
def test_help_imports_no_model(command: str, word: str) -> None:
    said, modules = helped(*command.split())
    assert word in said
    assert [name for name in modules if any(name == one or name.startswith(f"{one}.") for one in HEAVY)] == []
    own = [name for name in modules if name.partition(".")[0] == "asbuilt"]
    assert len(own) <= MOST, own


def test_all_that_packages_make_public_is_there() -> None:
    code = """
import asbuilt.plan.serve.conventions, asbuilt.plan.train.options  # which set the packages as attributes
import asbuilt.catalog, asbuilt.kernels.memory, asbuilt.plan, sys
packages = [asbuilt.catalog, asbuilt.kernels.memory, asbuilt.plan]
packages += [sys.modules["asbuilt.plan.serve"], sys.modules["asbuilt.plan.train"]]
for package in packages:
    assert sorted(package.PUBLIC) == sorted(package.__all__), package
    for name in package.__all__:
        found = getattr(package, name)
        assert name == "Width" or found.__name__ == name and callable(found), (package, name, found)
try:
    asbuilt.plan.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
