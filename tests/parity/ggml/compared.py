"""Our model of a file beside llama.cpp's answers: the worst difference of log-probabilities, and the tokens chosen.

llama.cpp departs from the published models in five places, which are put into ours for the comparison: gelu is looked
up in a table of 65,536 half-precision numbers, and is the tanh form for every family (`as_there`); the ramp of YaRN is
widened to whole pairs for gpt-oss too, whose config says that it is not; groups of experts are ranked by their two best
where DeepSeek-V2 takes the best; windows of phi3 are not heeded (`departing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import Source
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.model import Model
from asbuilt.spec import Attention, Branch, MixtureOfExperts, Rotary, YaRN
from asbuilt.spec import Model as ModelSpec
from ggml.reference import Answer

GELU = ("gelu", "gelu_tanh")


@dataclass(frozen=True)
class Result:
    """The worst difference of one model's log-probabilities from llama.cpp's; `plain` without what `as_there` does."""

    name: str
    comparisons: int
    worst: float
    plain: float
    greedy: bool


RESULTS: list[Result] = []


def table_of_gelu(x: Tensor) -> Tensor:
    """Gelu as ggml has it: x rounded to half precision, then what its table has for that, in half precision too."""
    looked_up = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, looked_up))


def has_gelu(model: Model) -> bool:
    """Returns whether any part of the model has gelu as its activation."""
    return next(_with_gelu(model), None) is not None


def _with_gelu(model: Model) -> Iterator[torch.nn.Module]:
    wanted = [ACTIVATIONS[name] for name in GELU]
    return (module for module in model.modules() if getattr(module, "activation", None) in wanted)


def as_there(model: Model) -> Model:
    """Returns the model with llama.cpp's gelu in place of its own."""
    for module in list(_with_gelu(model)):
        module.activation = table_of_gelu  # type: ignore[assignment]
    return model


def departing(source: Source) -> Source:
    """Returns the source with YaRN's ramp on whole pairs, groups ranked by two experts, and phi3 without windows."""
    blocks = tuple(
        replace(block, branches=tuple(_departing(branch, source.family) for branch in block.branches))
        for block in source.spec.blocks
    )
    return with_spec(source, replace(source.spec, blocks=blocks))


def _departing(branch: Branch, family: str) -> Branch:
    body = branch.body
    if isinstance(body, Attention) and family == "phi3":
        body = replace(body, window=None)
    positions = getattr(body, "positions", None)
    if isinstance(body, Attention) and isinstance(positions, Rotary) and isinstance(positions.scaling, YaRN):
        body = replace(body, positions=replace(positions, scaling=replace(positions.scaling, truncate=True)))
    if isinstance(body, MixtureOfExperts) and body.router.groups is not None:
        body = replace(body, router=replace(body.router, groups=replace(body.router.groups, score="two_best")))
    return replace(branch, body=body)


def without_temperature(source: Source) -> Source:
    """Returns the source with queries of one length wherever they stand."""
    blocks = []
    for block in source.spec.blocks:
        first = block.branches[0]
        assert isinstance(first.body, Attention)
        cold = replace(first, body=replace(first.body, temperature=None))
        blocks.append(replace(block, branches=(cold, *block.branches[1:])))
    return with_spec(source, replace(source.spec, blocks=tuple(blocks)))


def with_spec(source: Source, spec: ModelSpec) -> Source:
    """Returns the source as if its header had said `spec`."""
    return replace(source, reading=replace(source.reading, spec=spec))


def built(source: Source) -> Model:
    """Returns the model of a file in float32."""
    return load(departing(source), dtype="float32")


@torch.inference_mode()
def difference(model: Model, answers: Sequence[Answer], tie: float) -> tuple[float, bool]:
    """Returns the worst difference of log-probabilities, and whether the tokens that follow are the most probable.

    A token that is chosen there may be less probable here than another by `tie`.
    """
    worst, greedy = 0.0, True
    for answer in answers:
        tokens = torch.tensor([answer.prompt + answer.tokens[:-1]])
        ours = torch.log_softmax(model(tokens)[0].double(), -1)[len(answer.prompt) - 1 :].numpy()
        worst = max(worst, float(np.abs(ours - answer.logprobs).max()))
        chosen = ours[np.arange(len(answer.tokens)), answer.tokens]
        greedy &= bool((ours.max(-1) - chosen <= tie).all())
    return worst, greedy
