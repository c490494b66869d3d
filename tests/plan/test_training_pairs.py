"""Training plans of pairs of an image and a text: both towers are trained, and a pair is what is counted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import InputError, cost
from asbuilt.catalog import find, machines
from asbuilt.plan.train import train
from asbuilt.plan.train.options import CLIP_PAIRS
from asbuilt.plan.train.report import document, ranked_table, tables
from asbuilt.plan.train.search import search
from asbuilt.plan.train.subject import Subject
from asbuilt.spec import DualEncoder, Pass, weights

H100 = machines.find("h100-sxm")
PAIRS = strategies.pairs()


def contrasted(spec: DualEncoder) -> DualEncoder:
    """The model with the loss that is trained, without a bias of the similarities."""
    return replace(spec, vision=replace(spec.vision, bias=False))


@given(PAIRS, st.integers(1, 4), st.integers(2, 5))
@settings(max_examples=25)
def test_both_towers_are_trained(spec: DualEncoder, batch: int, seq: int) -> None:
    """State of all weights; products, and tensors saved, as folded over the whole model, beside the pixels."""
    spec, seq = contrasted(spec), min(seq, spec.max_positions)
    made = train(spec, H100, dtype="fp32", batch=batch, seq=seq)
    run = Pass(tokens=seq, batch=batch, images=1, width=4)
    trained = sum(weight.size for _, weight, _ in weights(spec) if not weight.frozen and weight.learned)
    assert made.state.gradients == 4 * trained
    whole = cost.flops(spec, run)
    assert made.unit == "pairs"
    assert made.flops_per_token["exact"] * batch == pytest.approx(whole.training, rel=1e-12)
    assert made.flops_per_token["exact_causal"] * batch == pytest.approx(whole.training_causal, rel=1e-12)
    assert made.trial.step.flops == whole.training_causal
    patches, stage = spec.patches, made.trial.fullest
    pixels = 4 * batch * patches.channels * patches.image_size**2
    assert stage.activations + stage.outside == cost.saved(spec, run).all + pixels
    repeated = train(spec, H100, dtype="fp32", batch=batch, seq=seq, checkpointing="full").trial.fullest
    inputs = sum(kind.kept["full"] * count for kind, count in repeated.section.kinds)
    tower = batch * patches.n_tokens * spec.vision.tower.stream_width * spec.vision.tower.n_layers
    assert inputs == 4 * (tower + batch * seq * spec.stream_width * spec.n_layers)
    assert stage.logits == 4 * batch * batch


def clip(**changes: Any) -> Any:  # noqa: ANN401
    return train("clip-vit-base-patch32", H100, **{"batch": 64, **changes})


def test_what_a_pair_costs_by_the_papers_sizes() -> None:
    """6 FLOPs a parameter and token: 63.4M parameters of 77 tokens, 87.8M of 50, an image of 7 x 7 and the class."""
    spec = find("clip-vit-base-patch32").spec()
    assert isinstance(spec, DualEncoder)
    seen = cost.total_parameters(spec.vision)
    made = clip()
    text = made.parameters - seen
    assert (round(text / 1e5), round(seen / 1e5)) == (634, 878)
    assert made.flops_per_token["6ND"] == 6 * (text * 77 + seen * 50)
    assert made.tokens == CLIP_PAIRS == 32 * 400_000_000
    assert made.flops_total == made.flops_per_token["6ND"] * CLIP_PAIRS
    assert clip(tokens=1e9).flops_total == made.flops_per_token["6ND"] * 1e9


def test_the_similarities_grow_with_the_square_of_the_batch() -> None:
    """Of n times as many pairs n^2 similarities; of each pair one product with every text of its batch."""
    n, batch = random.randint(2, 5), 32
    one, more = clip(batch=batch), clip(batch=n * batch)
    assert more.logits_bytes == n * n * one.logits_bytes == 4 * (n * batch) ** 2
    grown = more.flops_per_token["exact"] - one.flops_per_token["exact"]
    assert grown == pytest.approx(3 * 2 * 512 * (n - 1) * batch, rel=1e-6)
    many = clip(batch=2**16)
    assert many.trial.fullest.loss_peak == 4 * 4 * 2**32


def test_a_step_is_of_pairs() -> None:
    made = clip(gpus=4, accumulate=3)
    assert made.trial.step.tokens == 4 * 3 * 64
    assert clip(gpus=4, tokens_per_step=4 * 5 * 64).trial.options.accumulate == 5
    said = json.loads(json.dumps(document(made)))
    assert (said["unit"], said["chinchilla_tokens"]) == ("pairs", None)
    printed = str([row for table in tables(made) for row in table.rows])
    assert "768 pairs" in printed
    assert "tokens" not in printed.replace("tokens, tables", "")
    assert any("pairs" in dict(line.numbers) for line in made.lines)


def test_suggestions_keep_the_pairs_that_are_contrasted() -> None:
    """A smaller micro-batch alters training, and there is neither a chunked loss nor an adapter."""
    made = clip(batch=2**15, accumulate=2, gpus=8)
    assert not made.fits
    said = [one.option for one in made.suggestions if one.fits and "micro-batch" not in one.option]
    assert any("--checkpointing" in option for option in said)
    assert not any(word in option for option in said for word in ("chunked", "lora", "--pp", "--cp"))
    spec = find("clip-vit-base-patch32").spec()
    ranked = search(Subject(spec), H100, replace(made.trial.options, batch=256), batches=(1, 2))
    assert {trial.options.batch for trial in ranked.trials} == {256}
    assert "pairs/s" in str(ranked_table(ranked).columns)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"chunked_loss": 2}, "chunked_loss"),
        ({"loss": "asbuilt"}, "loss"),
        ({"lora": 4}, "lora"),
        ({"gpus": 2, "pp": 2}, "pp"),
        ({"gpus": 7, "cp": 7}, "cp"),
        ({"pad_vocabulary": 128}, "pad_vocabulary"),
    ],
)
def test_what_pairs_do_not_have_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        clip(**changes)
    assert caught.value.field == field


def test_a_loss_that_is_not_trained_is_refused() -> None:
    spec = find("clip-vit-base-patch32").spec()
    assert isinstance(spec, DualEncoder)
    with pytest.raises(InputError, match="sigmoid"):
        train(replace(spec, vision=replace(spec.vision, bias=True)), H100)
