"""`asbuilt generate` and `convert` of encoder-decoders: folders that transformers made, with a tokenizer of the test's.

The prompt is what the encoder reads; the answer begins as the configs say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import write_tokenizer
from click.testing import Result
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    MarianConfig,
    PreTrainedModel,
    SwitchTransformersConfig,
    T5Config,
)

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.generate.decode import generate

Run = Callable[..., Result]
PROMPT = "translate: as built"
NEW = 10
STACKS = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 30,
    "decoder_ffn_dim": 30,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 30, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 3}
CONFIGS: dict[str, Callable[..., Any]] = {
    "t5": lambda **more: T5Config(**T5, **more),
    "switch": lambda **more: SwitchTransformersConfig(**T5, num_decoder_layers=2, num_experts=3, **more),
    "bart": lambda **more: BartConfig(**STACKS, decoder_start_token_id=5, **more),
    "marian": lambda **more: MarianConfig(**STACKS, decoder_start_token_id=7, forced_eos_token_id=None, **more),
}


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose weights are drawn anew each time."""
    made = tmp_path / "tiny"
    made.mkdir()
    n_vocab, end = write_tokenizer(made)
    config = CONFIGS[request.param](vocab_size=n_vocab, eos_token_id=end, pad_token_id=0, bos_token_id=None)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(0.0, 0.4)
    model.save_pretrained(made)
    return made


def theirs(folder: Path, prompts: list[str], **settings: object) -> list[list[int]]:
    """What transformers generates, greedily, up to the end token."""
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    longest = max(map(len, rows))
    source = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    out = model.generate(
        source,
        attention_mask=mask,
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW,  # type: ignore[operator]
        forced_eos_token_id=None,
        **settings,
    )
    end = tokenizer.token_to_id("</s>")
    answers = [row[1:] for row in out.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in answers]


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_answer_is_that_of_transformers(run: Run, folder: Path) -> None:
    said = document(run("generate", folder, PROMPT, "--max-new-tokens", NEW, "--json"))
    assert said["tokens"] == theirs(folder, [PROMPT])[0]
    assert said["prompt_tokens"] == len(PROMPT) + 1  # with the end token that the encoder reads
    source = open_model(folder)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    assert said["text"] == tokenizer.decode(said["tokens"])


def test_a_ragged_batch(folder: Path) -> None:
    source = open_model(folder)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    prompts = [PROMPT, "a", "somewhat longer than the others are"]
    sources = [tokenizer.encode(prompt, wrap=True) for prompt in prompts]
    steps = generate(load(source), sources, start=source.decoder_start, eos_ids=tokenizer.eos_ids, max_new_tokens=NEW)
    rows = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
    assert rows == theirs(folder, prompts)


def test_the_first_token_may_be_forced(run: Run, folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forced_bos_token_id": 11}))
    assert open_model(folder).decoder_start[1:] == (11,)
    said = document(run("generate", folder, PROMPT, "--max-new-tokens", NEW - 1, "--json"))
    assert [11, *said["tokens"]] == theirs(folder, [PROMPT])[0]


def test_converted_folders_have_the_same_logits(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", folder, out).exit_code == 0
    tokens = {"input_ids": torch.arange(2, 20)[None], "decoder_input_ids": torch.arange(5, 12)[None]}
    with torch.no_grad():
        have, want = (AutoModelForSeq2SeqLM.from_pretrained(path)(**tokens).logits for path in (out, folder))
    assert torch.equal(have, want)
    assert open_model(out).decoder_start == open_model(folder).decoder_start


def test_what_cannot_start_is_refused(run: Run, folder: Path) -> None:
    source = open_model(folder)
    model = load(source)
    with pytest.raises(InputError, match="start: empty"):
        generate(model, [[1]], max_new_tokens=1)
    with pytest.raises(InputError, match="start: not a token id"):
        generate(model, [[1]], start=[10**6], max_new_tokens=1)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(said | {"decoder_start_token_id": "first", "bos_token_id": None}))
    refused = run("generate", folder, PROMPT)
    assert refused.exit_code == 2
    assert "decoder_start_token_id" in refused.output
