"""Encoder-decoders decode from the cache as transformers does; and a head of its own, which only a file can say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import CASES
from harness import (
    KERNELS,
    ParityCase,
    asbuilt_loads,
    asbuilt_resaves,
    cacheable,
    check,
    random_tokens,
    randomise,
    transformers_loads,
    transformers_saves,
)
from safetensors.torch import load_file
from torch import nn
from translating import PADDED, TRANSLATING, Translating

from asbuilt.checkpoint.source import open_model
from asbuilt.generate.decode import generate
from asbuilt.nn.cache import Cache
from asbuilt.spec import EncoderDecoder, Head

BOTH = [
    pytest.param(case, variant, id=f"{case.family}-{variant}")
    for case in CASES.values()
    if isinstance(case.kind, Translating)
    for variant in case.configs
]


@pytest.mark.parametrize(("case", "drawn"), BOTH)
@torch.inference_mode()
def test_cached_decoding(case: ParityCase, drawn: str, tmp_path: Path) -> None:
    """Our logits, one token at a time, are those at the end of transformers' whole pass over each length."""
    rng = case.random(drawn, "cached")
    transformers_saves(case.config(drawn), rng.randrange(2**32), tmp_path, case.kind)
    mine, other = asbuilt_loads(tmp_path), transformers_loads(tmp_path, kind=case.kind)
    inputs = case.kind.inputs(rng, mine.spec)
    written = inputs["decoder_input_ids"][:, : min(16, cacheable(mine.spec))]
    want = [
        other(**inputs | {"decoder_input_ids": written[:, : t + 1]}, use_cache=False).logits[:, -1:]
        for t in range(written.shape[1])
    ]
    read = {"source_BS": inputs["input_ids"], "source_valid_BS": inputs["attention_mask"].bool()}
    for kernel in KERNELS:
        cache = Cache(
            mine.spec,
            batch=len(written),
            capacity=written.shape[1],
            dtype=torch.float32,
            source=inputs["input_ids"].shape[1],
        )
        each = enumerate(written.split(1, 1))
        steps = [mine(step, cache=cache, kernel=kernel, **({} if t else read)) for t, step in each]
        check(case.family, f"{drawn}, cached, {kernel}", {"head": torch.cat(steps, 1)}, {"head": torch.cat(want, 1)})


@pytest.mark.parametrize(("case", "drawn"), BOTH)
def test_greedy_decoding(case: ParityCase, drawn: str, tmp_path: Path) -> None:
    """Two sources of different lengths at once, each text beginning with the same two tokens."""
    rng = case.random(drawn, "greedy")
    transformers_saves(case.config(drawn), rng.randrange(2**32), tmp_path, case.kind)
    mine, other = asbuilt_loads(tmp_path), transformers_loads(tmp_path, kind=case.kind)
    assert isinstance(mine.spec, EncoderDecoder)
    source = random_tokens(rng, mine.spec.encoder.n_vocab)
    mask = torch.ones_like(source)
    mask[0, -PADDED:] = 0
    first = open_model(tmp_path).decoder_start[0]  # which transformers would put in front of any other
    start = [first, rng.randrange(mine.spec.n_vocab)]
    new = cacheable(mine.spec) - len(start)
    sources = [row[keep.bool()].tolist() for row, keep in zip(source, mask, strict=True)]
    have = torch.tensor(list(generate(mine, sources, start=start, max_new_tokens=new))).T
    # its cache has as many layers as the encoder, and some decoders here have more
    settings = {
        "do_sample": False,
        "use_cache": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "forced_eos_token_id": None,
        "num_beams": 1,
    }
    begun = torch.tensor([start, start])
    want = other.generate(source, attention_mask=mask, decoder_input_ids=begun, max_new_tokens=new, **settings)  # type: ignore[operator]
    assert torch.equal(have, want[:, len(start) :])


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_a_head_of_its_own(family: str, tmp_path: Path) -> None:
    """transformers 5 means to tie every head, and does not where a file has two tables: as those of 1.1 have."""
    case = CASES[family]
    rng = case.random("untied")
    model = TRANSLATING.make(case.config("gated"))
    randomise(model, rng.randrange(2**32))
    own = nn.Parameter(torch.randn_like(model.get_output_embeddings().weight))  # type: ignore[union-attr, operator]
    model.get_output_embeddings().weight = own  # type: ignore[union-attr]
    model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k != "lm_head.weight"}
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    config = first / "config.json"
    said = json.loads(config.read_text())
    said.pop("scale_decoder_outputs", None)
    config.write_text(json.dumps(said | {"tie_word_embeddings": False}))
    asbuilt_resaves(first, second)
    assert {name: t.tolist() for name, t in load_file(first / "model.safetensors").items()} == {
        name: t.tolist() for name, t in load_file(second / "model.safetensors").items()
    }
    for folder in (first, second):
        mine, other = asbuilt_loads(folder), transformers_loads(folder, kind=TRANSLATING)
        assert isinstance(mine.spec.head, Head)
        assert mine.spec.head.scale == 1.0
        inputs = TRANSLATING.inputs(rng, mine.spec)
        have, want = TRANSLATING.ours(mine, inputs), TRANSLATING.theirs(other, inputs)
        check(family, f"a head of its own, {folder.name}", have, want)
