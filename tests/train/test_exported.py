"""What a run exports beside the weights: a tokenizer that transformers reads as it is, and tokens in config.json."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import asbuilt
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train.recipe import Recipe, dumps, loads, read

LINES = 60


def words(count: int) -> str:
    return " ".join("".join(random.choices(string.ascii_lowercase[:6], k=random.randrange(1, 5))) for _ in range(count))


def made(name: str, folder: Path) -> Recipe:
    """A shipped recipe on a drawn text, for one step of a narrow model."""
    file, tokens = folder / "text.jsonl", ("data.tokenizer=bpe", "data.n_vocab=280")
    lines = [{"text": words(9), "source": words(6), "target": words(3)} for _ in range(LINES)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    narrow = {
        "bert": ("model.config.hidden_size=16", "model.config.intermediate_size=32"),
        "t5": ("model.config.d_model=16", "model.config.d_ff=32", "model.config.d_kv=8", "data.target=8"),
        "clip": (),
        "dense": ("model.config.hidden_size=16", "model.config.intermediate_size=32"),
    }[name]
    where = () if name == "clip" else (f"data.text={file}", *tokens)
    short = ("data.context=16", "data.batch=2", "run.steps=1", "data.validation=0.3", f"run.out={folder / 'run'}")
    return read(name, (*narrow, *where, *short))


@pytest.mark.parametrize("name", ["bert", "t5", "clip", "dense"])
def test_transformers_reads_the_tokenizer_as_it_is(tmp_path: Path, name: str) -> None:
    """Its classes of these families would build tokenizers of their own from the vocabulary."""
    folder = asbuilt.train(made(name, tmp_path)).exported
    mine, theirs = Tokenizer.from_file(folder), AutoTokenizer.from_pretrained(folder)
    text = f"  {words(20)}\n{random.randrange(10**6)}, é"
    assert theirs(text)["input_ids"] == mine.encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token == "<|end|>"
    assert theirs.eos_token_id == mine.eos_ids[0]


def test_an_encoder_decoder_writes_from_the_token_that_it_was_trained_with(tmp_path: Path) -> None:
    folder = asbuilt.train(made("t5", tmp_path)).exported
    said, tokenizer = json.loads((folder / "config.json").read_text()), Tokenizer.from_file(folder)
    content = {id_: token.content for id_, token in tokenizer.special_tokens.items()}
    assert content[said["decoder_start_token_id"]] == content[said["pad_token_id"]] == "<|pad|>"
    assert content[said["eos_token_id"]] == "<|end|>"
    asbuilt.generate(str(folder), words(3), max_new_tokens=2)


def test_tokens_that_the_config_names_stay(tmp_path: Path) -> None:
    eos = random.randrange(100)
    given = loads(dumps(made("dense", tmp_path)), changes=[f"model.config.eos_token_id={eos}"])
    assert json.loads((asbuilt.train(given).exported / "config.json").read_text())["eos_token_id"] == eos
