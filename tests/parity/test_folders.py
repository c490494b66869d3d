"""Only the folder crosses: both directions, what is written back, and decoding from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES
from harness import (
    KERNELS,
    ParityCase,
    asbuilt_loads,
    asbuilt_resaves,
    asbuilt_saves,
    cacheable,
    check,
    random_tokens,
    settings,
    transformers_loads,
    transformers_saves,
)
from safetensors.torch import load_file
from transformers import PreTrainedModel

from asbuilt.checkpoint.source import open_model
from asbuilt.families import FAMILIES
from asbuilt.generate.decode import generate
from asbuilt.nn.cache import Cache

# Families that transformers lacks, and what proves them.
ELSEWHERE = {
    "chinchilla": "tests/families/test_papers.py: the paper's equations, written out",
    "deepseek": "tests/families/test_deepseek.py: the paper's equations, written out",
    "kimi_k2": "tests/families/test_deepseek.py: deepseek_v3 under another name, by its own case",
    "step3p5": "tests/parity/cases/step3p7.py: the text of that whole",
    "palm": "tests/families/test_papers.py: the paper's equations, written out",
    "transfo-xl": "tests/families/test_transfo_xl.py: the paper's equations, written out",
    "rwkv7": "tests/families/test_config_rwkv7.py and tests/nn/test_delta_time_mixing.py: the paper's equations",
}


def test_every_family_has_a_case() -> None:
    assert set(CASES) | ELSEWHERE.keys() == set(FAMILIES)
    assert not set(CASES) & ELSEWHERE.keys()


def test_from_transformers(case: ParityCase, variant: str, tmp_path: Path) -> None:
    rng = case.random(variant, "from transformers")
    transformers_saves(case.config(variant), rng.randrange(2**32), tmp_path, case.kind)
    _agree(case, f"{variant} saved by transformers", tmp_path)


def test_to_transformers(case: ParityCase, variant: str, tmp_path: Path) -> None:
    rng = case.random(variant, "to transformers")
    asbuilt_saves(case.config(variant), rng.randrange(2**32), tmp_path / "saved")
    _agree(case, f"{variant} saved by asbuilt", tmp_path / "saved")


def _agree(case: ParityCase, label: str, folder: Path) -> None:
    mine = asbuilt_loads(folder, kind=case.kind)
    inputs = case.kind.inputs(case.random(label), mine.spec)
    for attention in case.attentions:
        want = case.kind.theirs(transformers_loads(folder, attention, case.kind), inputs)
        for kernel in KERNELS:
            check(case.family, f"{label}, {attention} and {kernel}", case.kind.ours(mine, inputs, kernel), want)


def test_what_is_loaded_is_saved(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """Tensors bit by bit; the config as transformers understands it; its rotary numbers as its model has them."""
    rng = case.random(variant, "and back")
    first, second = tmp_path / "first", tmp_path / "second"
    transformers_saves(case.config(variant), rng.randrange(2**32), first, case.kind)
    asbuilt_resaves(first, second)
    here, there = (load_file(folder / "model.safetensors") for folder in (first, second))
    here = case.kind.published(here)
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
    before, after = settings(first), settings(second)
    if case.family == "internlm3":  # transformers makes its model of llama's class, and says so; files name its own
        before.pop("architectures")
    assert {key: after.get(key) for key in before} == before  # older spellings may have been added
    one, other = (transformers_loads(folder, kind=case.kind) for folder in (first, second))
    torch.testing.assert_close(_tables(other), _tables(one), rtol=1e-6, atol=0.0)
    inputs = case.kind.inputs(rng, open_model(first).reading.spec)
    have, want = case.kind.theirs(other, inputs), case.kind.theirs(one, inputs)
    check(case.family, f"{variant}, transformers on what asbuilt saved again", have, want)


def _tables(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    factors = {name: getattr(module, "attention_scaling", None) for name, module in model.named_modules()}
    scalars = {name: torch.tensor(factor) for name, factor in factors.items() if factor is not None}
    return dict(model.named_buffers()) | scalars


@pytest.mark.decodes
@torch.inference_mode()
def test_cached_decoding(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """Our logits, one token at a time, are those at the end of transformers' whole pass over each length."""
    rng = case.random(variant, "cached")
    transformers_saves(case.config(variant), rng.randrange(2**32), tmp_path, case.kind)
    mine, other = asbuilt_loads(tmp_path, kind=case.kind), transformers_loads(tmp_path, kind=case.kind)
    tokens = random_tokens(rng, mine.spec.n_vocab, cacheable(mine.spec))
    for kernel in KERNELS:
        cache = Cache(mine.spec, batch=len(tokens), capacity=tokens.shape[1], dtype=case.kind.dtype)
        steps = [mine(tokens[:, t : t + 1], cache=cache, kernel=kernel) for t in range(tokens.shape[1])]
        want = [_end(other(tokens[:, : t + 1], use_cache=False).logits) for t in range(tokens.shape[1])]
        have = {"head": torch.cat(steps, 1)}
        check(case.family, f"{variant}, cached, {kernel}", have, {"head": torch.cat(want, 1)})


def _end(logits_BTV: torch.Tensor) -> torch.Tensor:
    return logits_BTV[:, -1:]


@pytest.mark.decodes
def test_greedy_decoding(case: ParityCase, variant: str, tmp_path: Path) -> None:
    rng = case.random(variant, "greedy")
    transformers_saves(case.config(variant), rng.randrange(2**32), tmp_path, case.kind)
    mine, other = asbuilt_loads(tmp_path, kind=case.kind), transformers_loads(tmp_path, kind=case.kind)
    prompts = random_tokens(rng, mine.spec.n_vocab, rng.randrange(1, 9))
    new = min(cacheable(mine.spec), mine.spec.max_positions) - prompts.shape[1]
    have = torch.tensor(list(generate(mine, prompts.tolist(), max_new_tokens=new))).T
    settings = {"do_sample": False, "use_cache": case.caches, "eos_token_id": None, "pad_token_id": 0}
    want = other.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, **settings)  # type: ignore[operator]
    assert torch.equal(have, want[:, prompts.shape[1] :])
