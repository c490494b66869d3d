"""A hundred fresh mutated specs on every run; `specs.py` beside this runs as many as one likes. And hostile ones."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import specs

from asbuilt.errors import InputError
from asbuilt.families import FAMILIES, read_config
from asbuilt.spec import Model, loads


def test_every_mutated_spec_is_described_or_refused() -> None:
    outcomes = specs.fuzz(100, random.randrange(2**32))
    assert set(outcomes) == {"described", "refused"}


def test_the_fuzzer_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(text: str) -> bool:
        try:
            return isinstance(loads(text), Model)
        except InputError as error:
            raise KeyError(error.field) from error

    monkeypatch.setattr(specs, "described", careless)
    with pytest.raises(AssertionError, match="KeyError"):
        specs.fuzz(2000, 1)


MLP = {"part": "MLP", "d_model": 4, "d_ff": 8, "activation": "relu"}
BRANCH = {"part": "Branch", "name": "ffn", "body": MLP}
BLOCK: dict[str, Any] = {"part": "Block", "branches": [BRANCH]}
SPEC: dict[str, Any] = {
    "part": "Model",
    "name": "x",
    "max_positions": 8,
    "blocks": [BLOCK],
    "embedding": {"part": "TokenEmbedding", "n_vocab": 5, "d_model": 4},
    "head": {"part": "Head", "n_vocab": 5, "d_model": 4},
}


def with_scale(digits: str) -> str:
    return json.dumps(SPEC | {"embedding": SPEC["embedding"] | {"scale": 0}}).replace(
        '"scale": 0', f'"scale": {digits}'
    )


HOSTILE = {
    "blocks repeated": json.dumps(SPEC | {"blocks": [{"repeat": 10**5, "item": BLOCK}]}),
    "blocks one more than allowed": json.dumps(SPEC | {"blocks": [{"repeat": 1025, "item": BLOCK}]}),
    "no blocks": json.dumps(SPEC | {"blocks": []}),
    "blocks that are none": json.dumps(SPEC | {"blocks": BLOCK}),
    "predictors repeated": json.dumps(SPEC | {"predictors": [{"repeat": 10**5, "item": BLOCK}]}),
    "10^400": with_scale("1" + "0" * 400),
    "10^5000": with_scale("1" + "0" * 5000),
    "infinity": with_scale("Infinity"),
    "no number": with_scale("NaN"),
    "true": with_scale("true"),
    "a part as a name": json.dumps(SPEC | {"name": BLOCK}),
    "a list as a name": json.dumps(SPEC | {"name": ["x"]}),
    "half a letter": json.dumps(SPEC | {"name": "\ud800"}),
    "deep": '{"part":"Model","blocks":' * 60 + "1" + "}" * 60,
    "wide": json.dumps(SPEC | {"embedding": SPEC["embedding"] | {"d_model": 2**31}}),
    "true as a size": json.dumps(SPEC | {"max_positions": True}),
    "a size as text": json.dumps(SPEC | {"max_positions": "8"}),
    "a number in a norm's place": json.dumps(SPEC | {"norm": 4}),
    "a list in a norm's place": json.dumps(SPEC | {"norm": [1]}),
    "a norm among blocks": json.dumps(SPEC | {"blocks": [BLOCK, {"part": "RMSNorm", "d": 4}]}),
    "a block in the head's place": json.dumps(SPEC | {"head": BLOCK}),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_spec_is_one_message_at_once(text: str) -> None:
    assert isinstance(loads(json.dumps(SPEC)), Model)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as refused:
        loads(text)
    assert time.process_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB
    assert len(str(refused.value)) < 1000


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_stack_deeper_than_any_is_refused_at_once(family: str) -> None:
    """1,000 layers are the most of any paper; each family says its bound, far above its published models."""
    began = time.process_time()
    for key in DEPTHS:
        with pytest.raises(InputError):
            read_config({"model_type": family, key: 10_000, "text_config": {key: 10_000}}, "x")
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama", "num_hidden_layers": 10_000}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": 2**31}, "hidden_size"),
        ({"model_type": "llama", "quantization_config": {"quant_method": ["fp8"]}}, "quantization_config"),
        ({"model_type": "llama", "quantization_config": {"quant_method": {"a": 1}}}, "quantization_config"),
        ({"model_type": "llama4", "vision_config": {"pixel_shuffle_ratio": 5e-324}}, "pixel_shuffle_ratio"),
        ({"model_type": "llama4", "vision_config": {"pixel_shuffle_ratio": 0.0}}, "pixel_shuffle_ratio"),
        ({"model_type": "llama", "rope_theta": float("inf")}, "rope_theta"),
        ({"model_type": "llama", "intermediate_size": float("nan")}, "intermediate_size"),
        ({"model_type": "llama", "vocab_size": 10**400}, "vocab_size"),
    ],
)
def test_a_hostile_config_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_config(changes, "x")
