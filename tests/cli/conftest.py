"""A command line that is run in this process, and a tiny checkpoint with a tokenizer for it to work on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asbuilt.checkpoint.save import save
from asbuilt.cli.main import cli
from asbuilt.families import llama
from asbuilt.nn import build
from asbuilt.spec import Rotary

Run = Callable[..., Result]
CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)


@pytest.fixture
def run() -> Run:
    """Runs `asbuilt` with the given words; stdin is what `input` says."""

    def invoke(*words: object, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in words], input=input)

    return invoke


def write_tokenizer(folder: Path) -> int:
    """Writes a tokenizer of one token per byte and an end token; returns how many tokens that is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return made.get_vocab_size()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A llama of two layers whose weights are drawn anew each time, with a tokenizer and a context of 64 tokens."""
    folder = tmp_path / "tiny"
    n_vocab = write_tokenizer(tmp_path / "text")
    rotary = Rotary(d_rotary=8)
    spec = llama.build(
        n_vocab=n_vocab,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=40,
        max_positions=CONTEXT,
        rotary=rotary,
        tied=False,
        name="tiny",
    )
    save(build(spec, seed=random.randrange(2**32)), folder, family="llama", carried={})
    for file in (tmp_path / "text").iterdir():
        file.rename(folder / file.name)
    return folder


def config_of(folder: Path) -> dict[str, object]:
    """The folder's config.json."""
    return json.loads((folder / "config.json").read_text())
