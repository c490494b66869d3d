"""Training plans: published figures, derived through the plan, and what a plan says of itself."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import strategies
from formulas import every_section
from hypothesis import given
from hypothesis import strategies as st

from asbuilt import catalog, cost
from asbuilt.catalog import find, machines
from asbuilt.errors import InputError
from asbuilt.plan import Options, Subject, TrainPlan, train
from asbuilt.plan.explain import explain
from asbuilt.plan.lines import Line
from asbuilt.plan.render import html, markdown
from asbuilt.plan.train.options import ASSUMPTIONS, CHINCHILLA
from asbuilt.plan.train.report import document, tables
from asbuilt.plan.train.search import search
from asbuilt.spec import DualEncoder, Pass, VisionLanguageModel, weights

H100 = machines.find("h100-sxm")
PLANS = (
    ("llama-3-8b", {}),
    ("llama-3-8b", {"gpus": 8, "zero": 3, "checkpointing": "full", "chunked_loss": 8}),
    ("llama-3-8b", {"gpus": 32, "tp": 2, "pp": 4, "cp": 2, "accumulate": 8, "zero": 1, "price": 2.5, "tokens": 1e12}),
    ("llama-3.2-1b", {"gpus": 8, "pp": 4, "optimizer": "adafactor", "checkpointing": "selective"}),
    ("mixtral-8x7b", {"gpus": 64, "ep": 8, "tp": 2, "zero": 2, "optimizer": "muon", "offload": "all"}),
    ("gemma-2-2b", {"lora": 16, "qlora": True, "optimizer": "adamw-8bit"}),
    ("gpt2", {"dtype": "fp32", "optimizer": "sgd-momentum", "seq": 256, "batch": 3}),
)


def plan(name: str, **changes: Any) -> TrainPlan:  # noqa: ANN401
    return train(name, H100, **changes)


def test_llama_3_8b_state() -> None:
    """16 bytes a parameter, one after the other: the running total that the field quotes."""
    running = [step["running_bytes"] for step in document(plan("llama-3-8b"))["ladder"][:5]]
    assert [round(nbytes / 1e9, 1) for nbytes in running] == [16.1, 32.1, 64.2, 96.4, 128.5]
    assert running[-1] == 16 * cost.total_parameters(find("llama-3-8b").spec())


def test_llama_3_8b_activations_and_logits() -> None:
    found = document(plan("llama-3-8b", batch=1, seq=4096, checkpointing="full"))
    assert found["activation_bytes"] == 32 * 4096 * 4096 * 2 == pytest.approx(1.07e9, rel=5e-3)
    assert found["logits_bytes"] == 4096 * 128256 * 4 == pytest.approx(2.10e9, rel=5e-3)
    chunked = document(plan("llama-3-8b", batch=1, seq=4096, checkpointing="full", chunked_loss=8))
    assert 8 * chunked["logits_bytes"] == found["logits_bytes"]


@pytest.mark.parametrize(("zero", "stated"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.875)])
def test_zero_stages(zero: int, stated: float) -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), Figure 1: 7.5B parameters, 64 GPUs, mixed-precision Adam."""
    found = train(None, H100, parameters=7.5e9, gpus=64, zero=zero)
    assert found.state.total / 1e9 == pytest.approx(stated, abs=0.05)
    assert found.per_device_bytes == found.state.total


def test_fifteen_trillion_tokens() -> None:
    """At a utilisation of the whole step that is given, the days are 6ND at it; 989.4 TFLOP/s is the vendor's."""
    found = plan("llama-3-8b", tokens=15e12, gpus=1024, zero=3, price=2.0, utilisation=0.4)
    assert found.flops_total == pytest.approx(7.2e23, rel=5e-3)
    assert found.days * 86400 * 1024 * 989.4e12 * 0.4 == pytest.approx(found.flops_total, rel=1e-4)
    assert found.money == pytest.approx(found.days * 24 * 1024 * 2.0)
    assert found.chinchilla_tokens == CHINCHILLA * found.active


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "gpt2", "gemma-2-2b"])
def test_exact_flops_are_those_of_the_bill(name: str) -> None:
    spec, seq = find(name).spec(), 1024
    found = train(spec, H100, seq=seq).flops_per_token
    whole = cost.flops(spec, Pass(tokens=seq))
    assert found["exact"] * seq == whole.training
    assert found["exact_causal"] * seq == whole.training_causal
    assert found["6ND"] == 6 * cost.active_parameters(spec)


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "llama-3.2-1b"])
def test_undivided_activations_are_those_of_the_bill(name: str) -> None:
    spec = find(name).spec()
    run = Pass(tokens=2048, batch=2)
    bill = cost.saved(spec, run)
    for way, kept in (("none", bill.all), ("selective", bill.selective), ("full", bill.checkpointed)):
        stage = train(spec, H100, seq=2048, batch=2, checkpointing=way).trial.fullest
        assert stage.activations + stage.outside == kept
    assert stage.logits == cost.logits_bytes(spec, dataclasses.replace(run, width=4))


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "llama-3.2-1b", "gemma-2-2b"])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 4}, {"zero": 3}])
def test_devices_together_hold_the_model(name: str, degrees: dict[str, Any]) -> None:
    """What tensor parallelism repeats are vectors and routers, less than a thousandth; stages repeat a tied table."""
    spec, tp = find(name).spec(), degrees.get("tp", 1)
    options = Options(gpus=8, **degrees)
    shares = Subject(spec).shares(options)
    every = list(every_section(shares, options.pp))
    held = sum(stage.dense.weights + stage.experts.weights for stage in every)
    held -= shares.copied.weights if len(every) > 1 else 0
    assert sum(n for section in every for _, n in section.stage.blocks) == spec.n_layers
    assert held * tp == pytest.approx(cost.weight_bytes(spec, "bf16"), rel=1e-3 if tp > 1 else 0)
    tied = cost.parameters(spec)["head"] == 0
    assert (shares.copied.weights > 0) == tied


def value(line: Line) -> float:
    """The formula, put into numbers and worked out by Python."""
    text = line.formula.replace("×", "*").replace("−", "-")
    names = {place: f"numbers[{place!r}]" for place in line.numbers}
    for place in sorted(names, key=len, reverse=True):
        text = text.replace("{" + place + "}", names[place])
    return eval(text, {"ceil": math.ceil, "max": max, "min": min, "numbers": dict(line.numbers)})


@pytest.mark.parametrize(("name", "changes"), PLANS, ids=str)
def test_every_line_is_its_formula(name: str, changes: dict[str, Any]) -> None:
    found = plan(name, **changes)
    derived = [line for line in found.lines if line.formula]
    assert len(derived) > 10
    for line in derived:
        assert value(line) == pytest.approx(line.value, rel=1e-12), line
    assert sum(line.value for line in found.ladder[:-1]) == found.ladder[-1].value == found.per_device_bytes
    text = "\n".join(explain(found.lines))
    assert all(line.name in text for line in found.lines)


@pytest.mark.parametrize(("name", "changes"), PLANS, ids=str)
def test_the_document_has_its_keys(name: str, changes: dict[str, Any]) -> None:
    found = plan(name, **changes)
    said = json.loads(json.dumps(document(found)))
    assert {
        "fits",
        "ladder",
        "state_bytes",
        "activation_bytes",
        "logits_bytes",
        "per_device_bytes",
        "flops_total",
        "days",
        "layout",
        "communication",
        "suggestions",
    } <= said.keys()
    assert {"weights", "gradients", "master", "optimizer"} <= said["state_bytes"].keys()
    assert said["layout"].keys() == {"dp", "tp", "pp", "ep", "cp", "zero", "hsdp"}
    assert said["ladder"][-1]["running_bytes"] == said["per_device_bytes"]
    assert said["fits"] == (said["per_device_bytes"] + said["reserve_bytes"] <= said["memory_bytes"])
    degrees = said["layout"]
    assert math.prod(degrees[name] for name in ("dp", "tp", "pp", "cp")) == found.trial.layout.gpus


@pytest.mark.parametrize(("name", "changes"), PLANS, ids=str)
def test_renderings(name: str, changes: dict[str, Any]) -> None:
    found = plan(name, **changes)
    written = markdown(tables(found))
    for block in written.strip().split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1
    assert found._repr_html_() == html(tables(found))
    assert f"{found.per_device_bytes:,}" in written
    assert "<script" not in train(dataclasses.replace(find("gpt2").spec(), name="<script>"), H100)._repr_html_()


def test_suggestions_hold_what_they_promise() -> None:
    """Each change, typed as it is said, comes to what is said of it; the best come first."""
    for name, changes in (
        ("llama-3-8b", {}),
        ("llama-3-8b", {"gpus": 2, "batch": 4}),
        ("llama-3.1-405b", {"gpus": 64}),
    ):
        found, order = plan(name, **changes), []
        assert not found.fits
        assert any(s.fits for s in found.suggestions)
        assert [s.fits for s in found.suggestions] == sorted((s.fits for s in found.suggestions), reverse=True)
        for suggestion in found.suggestions:
            asked = dict(re.findall(r"--([a-z-]+)(?: ([a-z0-9][a-z0-9-]*))?", suggestion.change))
            fields = {
                k.replace("micro-", "").replace("-", "_"): int(v) if v.isdigit() else v or True
                for k, v in asked.items()
            }
            again = plan(name, **(changes | fields))
            assert again.per_device_bytes == suggestion.per_device_bytes < found.per_device_bytes
            assert again.fits == suggestion.fits
            step, before, gpus = again.trial.step, found.trial.step, again.trial.layout.gpus
            another = bool(asked.keys() & {"optimizer", "lora", "qlora"})
            cost = gpus * step.seconds / step.tokens if again.fits else again.per_device_bytes
            order.append((not again.fits, gpus > found.trial.layout.gpus, another, cost))
            said = f"{again.per_device_bytes / 1e9:,.1f} GB per device instead of {found.per_device_bytes / 1e9:,.1f}: "
            over = again.per_device_bytes + again.trial.reserve - again.trial.memory
            said += "fits; " if again.fits else f"still {over / 1e9:,.1f} GB over; "
            pace = step.tokens / step.seconds / (before.tokens / before.seconds)
            assert suggestion.effect == f"{said}{pace:.2f}x the tokens/s"
        assert order == sorted(order)


def test_search_ranks_what_fits() -> None:
    options = Options(gpus=16, accumulate=2)
    found = search(Subject(find("llama-3-8b").spec()), H100, options, most=1000)
    assert 0 < found.fitting == len(found.trials) <= found.tried
    seconds = [trial.step.seconds for trial in found.trials]
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(seconds))
    assert all(trial.fits and trial.layout.gpus == 16 for trial in found.trials)
    assert {trial.step.tokens for trial in found.trials} == {16 * 2 * 4096}


REFUSED = (
    ({"gpus": 3, "tp": 3}, "tp", "1, 2, 4, 8, 16 or 32"),
    ({"gpus": 64, "pp": 64}, "pp", "n_layers = 32"),
    ({"gpus": 8, "ep": 2}, "ep", "1"),
    ({"gpus": 9, "tp": 2}, "gpus", "a multiple of 2"),
    ({"gpus": 3, "cp": 3}, "cp", "1, 2, 4"),
    ({"zero": 4}, "zero", "0, 1, 2 or 3"),
    ({"gpus": 0}, "gpus", "from 1"),
    ({"tp": -1}, "tp", "from 1"),
    ({"batch": 0}, "batch", "from 1"),
    ({"seq": 2**40}, "seq", "2^31-1"),
    ({"optimizer": "adam"}, "optimizer", "adamw-8bit"),
    ({"dtype": "fp8"}, "dtype", "bf16, fp16 or fp32"),
    ({"checkpointing": "some"}, "checkpointing", "none, selective, full, megatron-selective or torchtitan-op"),
    ({"offload": "disk"}, "offload", "optimizer"),
    ({"utilisation": 1.5}, "utilisation", "at most 1"),
    ({"utilisation": math.nan}, "utilisation", "above 0"),
    ({"price": -1.0}, "price", "at least 0"),
    ({"tokens": 0.0}, "tokens", "above 0"),
    ({"lora": 8, "targets": ("qq",)}, "targets", "q, k, v, o, gate, up or down"),
    ({"targets": ("q",)}, "targets", "--lora"),
    ({"chunked_loss": 0}, "chunked_loss", "from 1"),
    ({"speed": 2}, "options", "zero"),
)


@pytest.mark.parametrize(("changes", "field", "allowed"), REFUSED, ids=str)
def test_refused_by_name(changes: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(InputError) as error:
        plan("llama-3-8b", **changes)
    assert error.value.field == field
    assert allowed in str(error.value)


@pytest.mark.parametrize("changes", [{"optimizer": "adafactor"}, {"optimizer": "muon"}, {"lora": 8}, {"qlora": True}])
def test_a_number_of_parameters_has_no_shapes(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="MODEL"):
        train(None, H100, parameters=1e9, **changes)


def test_experts_are_divided_by_their_own_degree() -> None:
    with pytest.raises(InputError) as error:
        plan("mixtral-8x7b", gpus=16, ep=16)
    assert error.value.field == "ep"
    assert "1, 2, 4 or 8" in str(error.value)


def test_every_assumption_is_in_the_documentation() -> None:
    written = (Path(__file__).parents[2] / "docs" / "plan-train.md").read_text()
    for name, words in ASSUMPTIONS.items():
        assert f"| {name} | {words} |" in written


@given(strategies.seers(), st.sampled_from(("adamw", "muon")))
def test_what_sees_is_held_and_not_trained(spec: VisionLanguageModel, optimizer: str) -> None:
    """Beside the plan of the text alone only the weights differ, by the towers' and the projectors'."""
    seeing, text = (train(one, H100, optimizer=optimizer, seq=4) for one in (spec, spec.text))
    beside = [part for part in (spec.vision, spec.hearing) if part is not None]
    more = 2 * sum(weight.size for part in beside for _, weight, _ in weights(part))
    assert seeing.state.weights - text.state.weights == more
    assert replace(seeing.state, weights=0) == replace(text.state, weights=0)
    assert seeing.per_device_bytes - text.per_device_bytes == more
    assert seeing.trial.step.seconds == text.trial.step.seconds


def test_pairs_of_sounds_and_texts_are_refused() -> None:
    with pytest.raises(InputError, match="pairs of sounds"):
        plan(next(n for n in catalog.names() if find(n).spec().reads == ("tokens", "audio")))


@pytest.mark.parametrize("options", [{}, {"zero": 3, "checkpointing": "full"}, {"lora": 8, "qlora": True}])
def test_every_published_model_is_planned_but_those_that_hear_and_other_losses(options: dict[str, Any]) -> None:
    refused = set()
    for name in catalog.names():
        if isinstance(find(name).spec(), DualEncoder):  # tests/plan/test_training_pairs.py
            continue
        try:
            made = plan(name, gpus=8, **options)
        except InputError:
            refused.add(name)
            continue
        assert made.per_device_bytes > 0, name
        spec, seq = find(name).spec(), made.trial.options.seq
        whole = cost.flops(spec, Pass(tokens=seq))
        if not options.get("lora"):
            assert made.flops_per_token["exact"] * seq == pytest.approx(whole.training, rel=1e-12), name
            assert made.flops_per_token["exact_causal"] * seq == pytest.approx(whole.training_causal, rel=1e-12), name
        assert whole.training_causal <= whole.training, name
        if not options:  # of one replica's step
            assert made.trial.step.flops == whole.training_causal, name
        assert json.loads(json.dumps(document(made)))["model"] == name
    specs = {name: find(name).spec() for name in catalog.names()}
    assert refused == {n for n, spec in specs.items() if "audio" in spec.reads}


def test_no_text_token_uses_what_sees() -> None:
    for name in ("gemma-3-4b-mm", "llava-1.5-7b", "llama-4-scout"):
        spec = find(name).spec()
        assert isinstance(spec, VisionLanguageModel)
        assert plan(name, gpus=64, zero=3).active == cost.active_parameters(spec.text)


@pytest.mark.parametrize(("words", "field"), [({"seq": 16}, "seq"), ({"seq": 4096}, "seq")])
def test_an_image_is_as_long_as_it_is(words: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        plan("vit-base-patch16-224", **words)


def test_a_bare_number_says_no_layouts_and_is_no_fraction() -> None:
    with pytest.raises(InputError, match="search"):
        search(Subject(parameters=7e9), H100, Options(gpus=8))
    with pytest.raises(InputError, match="parameters"):
        train(None, H100, parameters=0.5)


def test_a_vocabulary_that_tp_does_not_divide_is_padded() -> None:
    """GPT-2 on 4 devices: 50,257 rows are padded to 50,304, 12,576 a device; on one it is as it is."""
    stage = plan("gpt2", gpus=4, tp=4).trial.fullest
    assert stage.logits == 1024 * 12576 * 4
    before = stage.section.shares.before.dense.weights
    assert before == 2 * (12576 * 768 + 1024 * 768)  # its share of the table, and the positions
    assert plan("gpt2").trial.fullest.logits == 1024 * 50257 * 4
