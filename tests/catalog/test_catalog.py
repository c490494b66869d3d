"""The catalogue: its rows are the published configs, found under the names people type, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asbuilt.catalog import find, names
from asbuilt.errors import InputError
from asbuilt.families import FAMILIES, load_config_file, read_config, write_config
from asbuilt.spec import weights

MODELS = Path(__file__).parents[3] / "shared" / "models"
# The shared files of Llama 2 are the first revision, whose context was corrected from 2048 to the paper's 4096 later.
CONTEXT_CORRECTED = ("llama-2-7b", "llama-2-70b")
# Billions of parameters as published, rounded or cut off, for rows whose config is not at hand.
ROUNDED = {
    "bart-base": 0.139,
    "bart-large": 0.406,
    "mt5-small": 0.300,
    "t5-11b": 11.3,
    "t5-large": 0.737,
    "distilgpt2": 0.082,
    "gpt2-medium": 0.355,
    "llama-1-13b": 13.0,
    "llama-1-30b": 32.5,
    "llama-1-65b": 65.2,
    "llama-2-13b": 13.0,
    "llama-3.1-70b": 70.6,
    "llama-3.3-70b": 70.6,
    "llama-3.2-3b": 3.21,
    "smollm2-360m": 0.362,
    "tinyllama-1.1b": 1.10,
    "palm-8b": 8.63,
    "palm-62b": 62.50,
    "gpt-oss-120b": 116.83,
}


@pytest.mark.parametrize("name", names())
def test_row_is_the_published_config(name: str) -> None:
    path = MODELS / f"{name.removesuffix('-text')}.json"
    entry = find(name)
    spec = entry.spec()
    if name in ROUNDED:
        billions = sum(weight.size for _, weight, _ in weights(spec)) / 1e9
        digits = len(str(ROUNDED[name]).partition(".")[2])
        assert abs(billions - ROUNDED[name]) < 10.0**-digits
        return
    if not MODELS.exists():
        pytest.skip(f"no published models at {MODELS}")
    assert path.exists(), "neither a published config nor a number in ROUNDED to hold the row against"
    config = load_config_file(path)
    published = read_config(config["text_config"] if name.endswith("-text") else config, name)
    if name in CONTEXT_CORRECTED:
        assert published.spec.max_positions == spec.max_positions // 2
        spec = replace(spec, max_positions=published.spec.max_positions)
    assert spec == published.spec
    assert entry.family == published.family
    assert published.dtype in (None, entry.dtype)
    assert published.quantization == entry.quantization


def test_every_published_config_of_a_family_has_a_row() -> None:
    if not MODELS.exists():
        pytest.skip(f"no published models at {MODELS}")
    files = {path.stem: json.loads(path.read_text()) for path in MODELS.glob("*.json")}
    ours = {name for name, config in files.items() if isinstance(config, dict) and config.get("model_type") in FAMILIES}
    assert ours
    assert ours <= set(names())


@pytest.mark.parametrize("name", names())
def test_row_can_be_written_as_a_config(name: str) -> None:
    entry = find(name)
    spec = entry.spec()
    assert read_config(write_config(entry.family, spec, {}, entry.dtype), name).spec == spec
    assert spec.name == name
    assert entry.source


@pytest.mark.parametrize(
    "typed",
    ["Llama-3-8B", "llama_3_8b", "meta-llama/Meta-Llama-3-8B", " llama-3-8b ", "META-LLAMA/llama-3-8b"],
)
def test_spellings(typed: str) -> None:
    assert find(typed).name == "llama-3-8b"


def test_a_hub_suffix() -> None:
    assert find("meta-llama/Llama-2-7b-hf").name == "llama-2-7b"


def test_unknown_names_are_told_their_neighbours() -> None:
    with pytest.raises(InputError, match="llama-3-8b"):
        find("llama-3-8")
    with pytest.raises(InputError, match="asbuilt models"):
        find("§" * 1000)


def test_no_torch_and_no_numpy() -> None:
    code = "import sys, asbuilt.catalog, asbuilt.families.llama; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
