"""Every end that transformers puts on a decoder's trunk: the trunk alone, labels of texts, of tokens and of spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from cases import CASES
from harness import (
    CAUSAL,
    Inputs,
    Kind,
    Trace,
    asbuilt_loads,
    asbuilt_resaves,
    asbuilt_saves,
    check,
    random_tokens,
    settings,
    transformers_loads,
    transformers_saves,
)
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from asbuilt.families import FAMILIES
from asbuilt.families import _family as family_of  # pyright: ignore[reportPrivateUsage]
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.spec import Classifier, decoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel

LABELS = 17  # enough that the largest is never small beside what rounding leaves of the stream


def _classes(family: str) -> list[str]:
    """The classes of a decoder's family that transformers has, but that of its language model."""
    return [name for name in family_of(family).other_ends if hasattr(transformers, name)]


DECODERS = [name for name in FAMILIES if name in CASES and CASES[name].kind is CAUSAL]
ENDS = [(family, name) for family in DECODERS for name in _classes(family)]


class Ended(Kind):
    """Texts of two lengths, padded on the right with the token that the config names, if it names one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the class."""
        return getattr(transformers, self.name)(config)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # a model, or a model and what was amiss
        """Returns what transformers' `from_pretrained` gives."""
        return getattr(transformers, self.name).from_pretrained(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns tokens in which the padding token is found at the end of a text, and within."""
        tokens = random_tokens(rng, spec.n_vocab)
        padding = getattr(spec.head, "padding", None)
        if padding is not None:
            tokens[0, rng.randrange(20, 40)] = padding
            tokens[1, rng.randrange(20, 40) :] = padding
        return {"input_ids": tokens}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns what transformers' model ends in."""
        out: Any = model(inputs["input_ids"], use_cache=False)
        if "start_logits" in out:
            return {"end": torch.stack((out.start_logits, out.end_logits), 1)}  # beside those of a whole text
        found = out.logits if "logits" in out else out.last_hidden_state
        return {"end": found if found.ndim == 3 else found[:, None]}

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """Returns the same of our model."""
        found = model(inputs["input_ids"], kernel=kernel)
        if getattr(model.spec.head, "labels", "") == "span":
            return {"end": found.transpose(1, 2)}
        return {"end": found if found.ndim == 3 else found[:, None]}


@pytest.mark.parametrize(("family", "name"), ENDS)
def test_an_end_is_read_and_written_as_transformers_has_it(family: str, name: str, tmp_path: Path) -> None:
    case, kind = CASES[family], Ended(name)
    rng = case.random(name)
    config = case.config(next(iter(case.configs)))
    config.architectures, config.num_labels = [name], 2 if name.endswith("QuestionAnswering") else LABELS
    config.pad_token_id = rng.randrange(config.vocab_size)
    if hasattr(config, "classifier_bias"):
        config.classifier_bias = True
    first, again, other = tmp_path / "first", tmp_path / "again", tmp_path / "other"
    transformers_saves(config, rng.randrange(2**32), first, kind)
    mine = asbuilt_loads(first)
    inputs = kind.inputs(rng, mine.spec)
    check(family, f"{name} saved by transformers", kind.ours(mine, inputs), kind.theirs(_loads(first, kind), inputs))
    asbuilt_resaves(first, again)
    here, there = (load_file(folder / "model.safetensors") for folder in (first, again))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)
    said, written = settings(first), settings(again)
    assert {key: written.get(key) for key in said} == said  # older spellings may have been added
    asbuilt_saves(config, rng.randrange(2**32), other)
    want = kind.theirs(_loads(other, kind), inputs)
    check(family, f"{name} saved by asbuilt", kind.ours(asbuilt_loads(other), inputs), want)


def _loads(folder: Path, kind: Kind) -> PreTrainedModel:
    return transformers_loads(folder, "eager", kind)


@pytest.mark.parametrize("family", dict(pair for pair in ENDS if pair[1].endswith("ForSequenceClassification")))
def test_a_missing_padding_token_is_that_of_the_class(family: str) -> None:
    kind = type(CASES[family].config(next(iter(CASES[family].configs))))
    assert family_of(family).padding == kind().pad_token_id


def test_the_padding_token_decides_where_a_text_ends() -> None:
    """Also where a mask marks padding that is another token; of a text of nothing else the first is read."""
    head = Classifier(d_model=12, n_labels=1, bias=False, labels="last", padding=5)
    spec = decoder(d_model=12, n_layers=1, n_heads=2, n_vocab=10, max_positions=16).changed(head=head)
    model, text = build(spec, seed=1), torch.tensor([[7, 8, 9, 6]])
    alone = model(text)
    torch.testing.assert_close(model(torch.tensor([[7, 8, 9, 6, 5, 5]])), alone)
    valid = torch.tensor([[True] * 4 + [False] * 2])
    torch.testing.assert_close(model(torch.tensor([[7, 8, 9, 6, 3, 3]]), valid_BT=valid), alone)
    torch.testing.assert_close(model(torch.tensor([[3, 3, 7, 8, 9, 6]]), valid_BT=valid.flip(1)), alone)
    torch.testing.assert_close(model(torch.tensor([[5, 5]])), model(torch.tensor([[5]])))
    whole = build(spec.changed(head=replace(head, padding=None)), seed=1)
    torch.testing.assert_close(whole(text), alone)
    assert not torch.allclose(whole(torch.tensor([[7, 8, 9, 6, 5, 5]])), alone)
