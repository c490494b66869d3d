"""What a training plan tells beside its figures: defaults, what is not counted, what to change, which layouts fit."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_training_by_hand import BASE, DENSE, MACHINE, SPARSE, TIED

from asbuilt.catalog import find
from asbuilt.catalog.machine import Link, Machine
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.plan import Options, Subject, train
from asbuilt.plan.train.plan import attempt, plan
from asbuilt.plan.train.report import document, ranked_document, ranked_table, tables
from asbuilt.plan.train.search import _latest, search
from asbuilt.spec import Rotary

DEFAULTS = {
    "gpus": 1,
    "batch": 1,
    "seq": 4096,
    "accumulate": 1,
    "optimizer": "adamw",
    "dtype": "bf16",
    "gradient_dtype": None,
    "master": True,
    "zero": 0,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "cp": 1,
    "hsdp": None,
    "schedule": None,
    "interleave": None,
    "fp8": False,
    "fp8_dispatch": False,
    "expert_nodes": None,
    "overlap_experts": False,
    "overlap_tensor": False,
    "pad_vocabulary": 1,
    "gather_context": False,
    "sequence_parallel": True,
    "divide_vocabulary": True,
    "checkpointing": "none",
    "documents": False,
    "chunked_loss": 1,
    "loss": "pytorch",
    "offload": "none",
    "lora": None,
    "targets": None,
    "qlora": False,
    "kernel_efficiency": None,
    "attention_efficiency": None,
    "utilisation": None,
    "tokens": None,
    "price": None,
    "effective_time": 0.9,
    "reserve": 0.05,
    "node": 8,
    "network": 50e9,
    "host": 25e9,
}


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_defaults_are_said_once() -> None:
    """Python's and the command line's are the same, and those that are documented."""
    assert asdict(Options()) == DEFAULTS
    said = json.loads(run("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", "--json").stdout)
    assert said["options"] == DEFAULTS
    text = run("plan", "train", "--help").stdout
    for shown in ("50GB/s", "25GB/s", "0.05", "4096", "adamw", "none", "master", "sequence-parallel"):
        assert f"default: {shown}]" in " ".join(text.split()) or shown in text
    assert said["assumptions"]["reserve"].startswith("5% of the memory")
    assert said["assumptions"]["network"].startswith("50 GB/s per GPU between nodes: a 400 Gb/s adapter")
    assert said["assumptions"]["products"].startswith("77% of the fastest product")
    chunked = json.loads(run("plan", "train", "gpt2", "--gpu", "h100-sxm", "--chunked-loss", "--json").stdout)
    assert chunked["options"]["chunked_loss"] == 8
    apart = json.loads(run("plan", "train", "gpt2", "--gpu", "h100-sxm", "--documents", "--json").stdout)
    assert apart["options"]["documents"] is True


def test_a_context_is_gathered_only_where_there_is_one() -> None:
    """A search tries others than the layout that is given."""
    with pytest.raises(InputError) as error:
        train(DENSE, MACHINE, gather_context=True)
    assert error.value.field == "gather_context"
    words = ("plan", "train", "gpt2", "--gpu", "h100-sxm", "--gpus", "2", "--gather-context")
    refused = run(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--cp" in refused.stderr
    assert run(*words, "--cp", "2").exit_code == run(*words, "--search").exit_code == 0


def test_options_reach_the_plan() -> None:
    """Each word of the command line, as the field that it is; bits are an eighth of bytes."""
    words = (
        "--gpus 16 --micro-batch 2 --seq 1k --accumulate 4 --optimizer muon --dtype fp16 --gradient-dtype fp32 "
        "--no-master --zero 1 --tp 2 --pp 2 --cp 2 --interleave 1 --no-sequence-parallel --checkpointing selective "
        "--no-divide-vocabulary --hsdp 2 --schedule 1f1b --fp8 --fp8-dispatch --expert-nodes 4 --overlap-experts "
        "--overlap-tensor --pad-vocabulary 128 --chunked-loss 4 --loss asbuilt --offload activations --lora 8 "
        "--targets q,v --qlora --tokens 2B --kernel-efficiency 0.5 --price 3 --effective-time 0.8 --reserve-share 0.1 "
        "--gather-context --node 4 --network 400Gb/s --host 16GB/s"
    )
    said = json.loads(run("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", *words.split(), "--json").stdout)
    assert said["options"] == DEFAULTS | {
        "gpus": 16,
        "batch": 2,
        "seq": 1000,
        "accumulate": 4,
        "optimizer": "muon",
        "dtype": "fp16",
        "gradient_dtype": "fp32",
        "master": False,
        "zero": 1,
        "tp": 2,
        "pp": 2,
        "cp": 2,
        "hsdp": 2,
        "schedule": "1f1b",
        "interleave": 1,
        "fp8": True,
        "fp8_dispatch": True,
        "expert_nodes": 4,
        "overlap_experts": True,
        "overlap_tensor": True,
        "pad_vocabulary": 128,
        "gather_context": True,
        "sequence_parallel": False,
        "divide_vocabulary": False,
        "checkpointing": "selective",
        "chunked_loss": 4,
        "loss": "asbuilt",
        "offload": "activations",
        "lora": 8,
        "targets": ["q", "v"],
        "qlora": True,
        "tokens": 2e9,
        "kernel_efficiency": 0.5,
        "price": 3,
        "effective_time": 0.8,
        "reserve": 0.1,
        "node": 4,
        "network": 50e9,
        "host": 16e9,
    }
    given = run("plan", "train", "gpt2", "--gpu", "h100-sxm", "--mfu", "0.4", "--json")
    assert json.loads(given.stdout)["step"]["mfu"]["6ND"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"utilisation": 0.4, "kernel_efficiency": 0.5}, "utilisation"),
        ({"kernel_efficiency": 0.0}, "kernel_efficiency"),
        ({"kernel_efficiency": 1.01}, "kernel_efficiency"),
        ({"kernel_efficiency": 0.5, "attention_efficiency": 0.35}, "attention_efficiency"),
        ({"utilisation": 0.4, "attention_efficiency": 0.35}, "attention_efficiency"),
        ({"gpus": 2, "pp": 2, "accumulate": 4, "interleave": 3}, "interleave"),  # stages of two blocks
        ({"gpus": 2, "pp": 2, "accumulate": 3, "interleave": 2}, "interleave"),  # no whole rounds
        ({"interleave": 2}, "interleave"),
        ({"interleave": 0}, "interleave"),
        ({"reserve": 1.0}, "reserve"),
        ({"node": 0}, "node"),
        ({"tokens": 1.1e18}, "tokens"),
        ({"price": 1.1e6}, "price"),
        ({"network": 1.1e15}, "network"),
        ({"host": 1.1e15}, "host"),
        ({"host": 0.0}, "host"),
        ({"network": 0.0}, "network"),
        ({"gradient_dtype": "int8"}, "gradient_dtype"),
        ({"lora": 0}, "lora"),
    ],
    ids=str,
)
def test_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        plan(Subject(DENSE), MACHINE, Options(**{"seq": 32, **changes}))
    assert error.value.field == field


def test_what_may_be() -> None:
    for changes in ({"utilisation": 1.0}, {"kernel_efficiency": 1.0}, {"price": 0.0}, {"reserve": 0.0}):
        assert plan(Subject(DENSE), MACHINE, Options(**{"seq": 32, **changes})).per_device_bytes > 0


def test_a_number_of_parameters_says_what_it_does_not_count() -> None:
    words = ("plan", "train", "--gpu", "h100-sxm", "--gpus", 2, "--zero", 3, "--parameters", "8B")
    said = json.loads(run(*words, "--json").stdout)
    assert said["parameters"] == {"total": 8_000_000_000, "active": 8_000_000_000}
    assert said["per_device_bytes"] == said["state_bytes"]["total"] == 64_000_000_000  # 16 bytes a parameter, halves
    assert [what.split()[0] for what in said["not_counted"]] == ["activations,", "blocks", "attention", "traffic"]
    assert said["flops_per_token"] == {"6ND": 48e9}
    assert said["communication"]["data"]["bytes"] == 24_000_000_000  # half of 3 x 16 GB
    printed = " ".join(run(*words).stdout.split())
    assert "What is counted fits" in printed
    assert "Not counted" in printed
    assert all(what in printed for what in said["not_counted"])
    assert document(train("gpt2", "h100-sxm"))["not_counted"] == []
    assert tables(train("gpt2", "h100-sxm"))[2].title == "It fits"


def test_a_model_or_a_number_of_parameters() -> None:
    both = run("plan", "train", "gpt2", "--parameters", "7e9", "--gpu", "h100-sxm")
    neither = run("plan", "train", "--gpu", "h100-sxm")
    assert (both.exit_code, neither.exit_code) == (2, 2)
    assert "are both given" in both.stderr
    assert "missing" in neither.stderr


def test_a_number_of_parameters_in_stages() -> None:
    """10^6 over 2 x 2: 250,000 here, 16 bytes each; 2 x 250,000 FLOPs a token forward, three times that in all."""
    found = plan(Subject(parameters=1e6), MACHINE, Options(**{**BASE, "gpus": 4, "tp": 2, "pp": 2, "accumulate": 3}))
    assert found.per_device_bytes == 4_000_000
    assert found.trial.step.compute_seconds == pytest.approx(3 * 500_000 * 64 / 0.5e12)
    assert found.trial.step.bubble == pytest.approx(1 / 4)
    assert found.trial.step.job.interleave == 1


def test_floors_are_called_floors() -> None:
    ways: tuple[dict[str, Any], ...] = ({"kernel_efficiency": 0.57}, {"utilisation": 0.4}, {})
    floor, given, expected = (
        "\n".join(f"{made.title} {made.rows}" for made in tables(train("gpt2", "h100-sxm", price=2.0, **options)))
        for options in ways
    )
    assert all(f"{what}, at least" in floor for what in ("one step", "days", "money"))
    assert "at least" not in given
    assert "at least" not in expected
    assert "at 40% of the dense rate over all of it" in given


def test_the_derivation_of_a_step() -> None:
    """Lines, units and numbers of a plan worked out in test_training_by_hand.py."""
    options = Options(**{**BASE, "gpus": 2, "pp": 2, "accumulate": 4, "interleave": 1})
    lines = {line.name: line for line in plan(Subject(DENSE), MACHINE, options).trial.step.lines()}
    assert {name: line.unit for name, line in lines.items()} == {
        "computing one micro-batch": "seconds",
        "communication: pipeline": "seconds",
        "one micro-batch": "seconds",
        "the pipeline's bubble": "of the micro-batches' time",
        "one step": "seconds",
    }
    assert lines["one micro-batch"].numbers == {
        "computing": pytest.approx(99.581952e-6),
        "tensor": 0,
        "expert": 0,
        "pipeline": pytest.approx(81.92e-9),
        "context": 0,
    }
    assert lines["communication: pipeline"].numbers == {"bytes one device sends": 32_768, "bytes a second": 100e9}
    assert lines["one step"].note == "lower bound"
    for way, more in (("none", ""), ("selective", ""), ("full", ", every block run again")):
        first = plan(Subject(DENSE), MACHINE, Options(**{**BASE, "checkpointing": way})).trial.step.lines()[0]
        assert first.note == f"training FLOPs, masked pairs skipped{more}"
    given = Options(**{**BASE, "kernel_efficiency": None, "utilisation": 0.5})
    (line,) = plan(Subject(DENSE), MACHINE, given).trial.step.lines()
    assert (line.name, line.numbers["utilisation"], line.unit) == ("one step", 0.5, "seconds")


def bare(gigabytes: float, parameters: float = 8e9, **options: Any) -> list[tuple[str, bool]]:  # noqa: ANN401
    """What is suggested for a number of parameters on GPUs of so much memory, and whether it is enough."""
    machine = Machine(name="m", memory_gb=gigabytes, bandwidth=2e12, rates={"bf16": 3e14}, source="made up")
    found = train(None, machine, parameters=parameters, **options)
    return [(s.change, s.fits) for s in found.suggestions]


def test_every_suggestion_for_two_gpus() -> None:
    """8B are 128 GB, of which 66.5 may be used: ZeRO-1 leaves 80, 2 72, 3 64; halves are 64; in 8 bits 80.25."""
    found = bare(70, gpus=2)
    assert sorted(change for change, fits in found if fits) == ["--offload optimizer", "--pp 2", "--tp 2", "--zero 3"]
    assert [change for change, fits in found if not fits] == ["--zero 2", "--zero 1", "--optimizer adamw-8bit"]


def test_more_gpus_share_what_is_sharded() -> None:
    """One GPU alone is given ZeRO-3 with more of them; what it was told to do it goes on with.

    ZeRO-1 on n is 32 GB of weights and gradients and 96 / n: 44 GB on 8, 38 on 16.
    """
    assert ("--gpus 2 --zero 3", True) in bare(70)
    assert [change for change, _ in bare(42, zero=1) if "--gpus" in change] == ["--gpus 16"]
    assert [change for change, _ in bare(40, gpus=2) if "--gpus" in change] == []  # copies of 128 GB, however many


def test_as_many_gpus_as_are_suggested() -> None:
    """10^12 parameters are 16 x 10^12 bytes: 3,906,250,000 on each of 4,096."""
    assert "--gpus 4096 --zero 3" in [change for change, _ in bare(3.90625, 1e12, reserve=0.0)]
    assert not any("--gpus" in change for change, _ in bare(3.9, 1e12, reserve=0.0))
    assert "--gpus 2 --zero 3" in [change for change, _ in bare(64, reserve=0.0)]


@pytest.mark.parametrize(
    ("options", "some", "none"),
    [
        ({"gpus": 8, "tp": 4, "node": 8}, "--tp 8", "--tp 4"),
        ({"gpus": 8, "tp": 4, "node": 4}, "--zero 1", "--tp 8"),
        ({"gpus": 3}, "--zero 1", "--pp"),
        ({"checkpointing": "full"}, "--lora 16 --qlora", "--checkpointing"),
        ({"checkpointing": "selective"}, "--checkpointing full", "--checkpointing selective"),
        ({"offload": "optimizer"}, "--checkpointing full", "--offload"),
        ({"optimizer": "sgd-momentum"}, "--checkpointing full", "--optimizer"),
        ({"optimizer": "muon"}, "--optimizer adamw-8bit", "--micro-batch"),
        ({"optimizer": "muon"}, "--optimizer adafactor", "--offload activations"),
        ({"batch": 6, "accumulate": 5}, "--micro-batch 3 --accumulate 10", "--micro-batch 6"),
        ({"batch": 3}, "--checkpointing full", "--micro-batch"),
    ],
    ids=str,
)
def test_what_is_suggested_and_what_is_not(options: dict[str, Any], some: str, none: str) -> None:
    said = changes("llama-3.1-70b", "h100-sxm", **options)
    assert some in said
    assert not any(none in change for change in said)


def test_a_loss_that_is_chunked_is_chunked_further_with_more_gpus_alone() -> None:
    said = changes("llama-3.1-70b", "h100-sxm", chunked_loss=4)
    assert [change.partition(" ")[0] for change in said if "--chunked" in change] == ["--gpus"]
    assert "--chunked-loss 8" in changes("llama-3.1-70b", "h100-sxm")


def test_layouts_of_a_model_with_an_encoder_are_searched_without_stages_and_rings() -> None:
    found = search(Subject(find("t5-small").spec()), MACHINE, Options(gpus=4, accumulate=4, seq=32), most=100)
    assert {(t.layout.tp, t.layout.dp) for t in found.trials} == {(1, 4), (2, 2), (4, 1)}
    assert {(t.layout.pp, t.layout.cp) for t in found.trials} == {(1, 1)}


def test_of_options_said_twice_the_last_counts() -> None:
    assert _latest(
        ["--zero 1", "--micro-batch 2 --accumulate 4", "--checkpointing full", "--micro-batch 1 --accumulate 8"]
    ) == [
        "--zero 1",
        "--micro-batch 1",
        "--accumulate 8",
        "--checkpointing full",
    ]


def test_what_just_fits() -> None:
    """5,242,624 bytes, as in test_training_by_hand.py; and a twentieth of a byte of the reserve is a byte."""
    fits = []
    for nbytes in (5_242_624, 5_242_623):
        machine = replace(MACHINE, memory_gb=nbytes / 1e9)
        fits.append(plan(Subject(DENSE), machine, Options(**{**BASE, "reserve": 0.0})).fits)
    assert fits == [True, False]
    odd = plan(Subject(DENSE), replace(MACHINE, memory_gb=1.000000001), Options(**BASE))
    assert odd.trial.reserve == 50_000_001


def test_the_ends_of_stages_and_of_numbers() -> None:
    for options in ({"gpus": 4, "pp": 4}, {"gpus": 32, "cp": 32}):
        assert plan(Subject(DENSE), MACHINE, Options(**{**BASE, **options})).per_device_bytes > 0
    assert train(None, MACHINE, parameters=1e15).parameters == 10**15
    t5 = find("t5-small").spec()
    assert train(t5, MACHINE, seq=32, dtype="bf16").per_device_bytes > 0
    for refused, field in (
        (lambda: plan(Subject(DENSE), MACHINE, Options(**{**BASE, "gpus": 5, "pp": 5})), "pp"),
        (lambda: train(None, MACHINE, parameters=1.5e15), "parameters"),
        (lambda: train(None, MACHINE, parameters=0.9), "parameters"),
        (lambda: train(None, MACHINE), "model"),
        (lambda: train("falcon-7b", MACHINE, gpus=2, tp=2), "tp"),  # 71 heads
        (lambda: train(t5, MACHINE, seq=32, gpus=2, pp=2), "pp"),
        (lambda: train(t5, MACHINE, seq=32, gpus=2, cp=2), "cp"),
    ):
        with pytest.raises(InputError) as error:
            refused()
        assert error.value.field == field


def test_the_length_where_none_is_given() -> None:
    assert [train(name, "h100-sxm").trial.options.seq for name in ("gpt2", "llama-3.1-8b")] == [1024, 4096]
    assert train("gpt2", "h100-sxm", seq=5).trial.options.seq == 5
    for seq in (77, 4096):
        assert train("gpt2", "h100-sxm", options=Options(seq=seq)).trial.options.seq == seq
    assert train(None, "h100-sxm", parameters=1e9).trial.options.seq == 4096


def test_every_line_and_its_unit() -> None:
    made = plan(Subject(DENSE), MACHINE, Options(**{**BASE, "gpus": 2, "tp": 2, "price": 2.0}))
    assert [(line.name, line.unit) for line in made.lines] == [
        ("logits", "bytes"),
        ("weights", "bytes"),
        ("gradients", "bytes"),
        ("master weights", "bytes"),
        ("first moment", "bytes"),
        ("second moment", "bytes"),
        ("activations", "bytes"),
        ("outside the blocks", "bytes"),
        ("the loss", "bytes"),
        ("per device", "bytes"),
        ("memory", "bytes"),
        ("reserve", "bytes"),
        ("left", "bytes"),
        ("computing one micro-batch", "seconds"),
        ("communication: tensor", "seconds"),
        ("one micro-batch", "seconds"),
        ("the pipeline's bubble", "of the micro-batches' time"),
        ("one step", "seconds"),
        ("model FLOPs utilisation, 6ND", "of the dense rate"),
        ("model FLOPs utilisation, exact", "of the dense rate"),
        ("model FLOPs utilisation, exact_causal", "of the dense rate"),
        ("Chinchilla-optimal tokens", "tokens"),
        ("FLOPs, 6ND", "FLOPs"),
        ("days", "days"),
        ("money", ""),
    ]
    sources = {line.name: line.source for line in made.lines if line.source}
    assert sources["the loss"].startswith("three float32 tensors")
    assert sources["reserve"].startswith("5% of the memory")
    assert sources["Chinchilla-optimal tokens"].startswith("20 tokens per active parameter")
    assert sources["computing one micro-batch"].startswith("if it is given, a lower bound")
    assert sources["communication: tensor"] == "wire, made up"


def test_what_is_noted_of_each_line() -> None:
    """What is shared out, what a block keeps, and which moment needs the most room."""

    def lines(spec: Any, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        return {line.name: line for line in plan(Subject(spec), MACHINE, Options(**{**BASE, **options})).ladder}

    for zero, shared in (
        (0, set()),
        (1, {"master weights", "first moment", "second moment"}),
        (2, {"gradients", "master weights", "first moment", "second moment"}),
        (3, {"weights", "gradients", "master weights", "first moment", "second moment"}),
    ):
        found = lines(DENSE, gpus=2, zero=zero)
        assert {name for name, line in found.items() if line.note == f"sharded by ZeRO-{zero}"} == shared
        assert not any("shared" in line.note for line in lines(DENSE, zero=zero).values())
    experts = lines(SPARSE, gpus=2, ep=2, zero=3)["weights"]
    assert experts.note == "sharded by ZeRO-3"
    assert experts.symbols == "ceil(parameters × bytes each / ranks) + experts' parameters × bytes each"
    alone = lines(DENSE)
    assert alone["activations"].symbols == "micro-batches at once × (blocks × kept by one)"
    assert alone["activations"].note == "checkpointing none: all that autograd saves"
    assert lines(DENSE, checkpointing="full")["activations"].note == "checkpointing full: each block's input"
    assert lines(DENSE, checkpointing="selective")["activations"].note.startswith("checkpointing selective: all but")
    assert alone["the loss"].symbols == "at once × logits"
    assert "the head's gradient" in lines(DENSE, chunked_loss=8)
    assert lines(DENSE, offload="all")["in the host's memory"].value == -3_449_600 + 432_128 - 432_128
    small = llama.build(
        n_vocab=50,
        d_model=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        d_ff=96,
        max_positions=32,
        rotary=Rotary(d_rotary=16),
        name="small",
    )
    assert "a block's backward pass" in lines(small, checkpointing="full")
    halves = lines(DENSE, chunked_loss=2)["the loss"]
    # 3 x 128,000 of the logits of half of the rows, and the gradient of 64 rows of 64 numbers in two bytes
    assert (halves.value, halves.symbols) == (392_192, "at once × logits + gradient of the head's input")


def test_the_run_in_a_table() -> None:
    """6 x 251,456 FLOPs a token by 6ND, 78,053,376 / 64 with full scores, 75,005,952 / 64 with masked pairs skipped."""
    step, run_ = tables(plan(Subject(DENSE), MACHINE, Options(**{**BASE, "tokens": 256e6})))[3:5]
    assert {row[0]: row[1] for row in run_.rows if "GPU hours" not in str(row[0])} == {
        "tokens": "256,000,000",
        "Chinchilla-optimal tokens": "5,029,120",
        "FLOPs, 6ND": "386,236,416,000,000",
        "FLOPs, exact, full scores": "312,213,504,000,000",
        "FLOPs, exact, masked pairs skipped": "300,023,808,000,000",
        "days, at least": "0.01",
    }
    assert [row[4] for row in step.rows if str(row[0]).startswith("model FLOPs")] == [
        "61.5% of 1 TFLOP/s bf16",
        "49.7% of 1 TFLOP/s bf16",
        "47.8% of 1 TFLOP/s bf16",
    ]


def test_suggestions_and_what_is_not_counted_in_tables() -> None:
    machine = replace(MACHINE, memory_gb=70)
    found = tables(train(None, machine, parameters=8e9, gpus=2))
    assert [table.title for table in found[5:]] == [
        "Not counted without a MODEL",
        "What to change, best first",
    ]
    assert {row[0]: row[1] for row in found[6].rows}.items() >= {"--zero 3": "yes", "--zero 2": "no"}.items()
    assert found[2].title == "It does not fit"
    assert [table.title for table in tables(train(None, machine, parameters=1e9))][2:3] == ["What is counted fits"]
    assert len(tables(plan(Subject(DENSE), MACHINE, Options(**BASE)))) == 5


def test_ranked_layouts_in_a_table() -> None:
    ranked = search(Subject(DENSE), MACHINE, Options(**{**BASE, "gpus": 2, "accumulate": 4, "node": 2}))
    table = ranked_table(ranked)
    assert table.title.startswith(f"{ranked.fitting} of {ranked.tried} layouts fit")
    said = "--gpus 2 --zero 1 --micro-batch 2 --accumulate 4 --checkpointing none"
    row = next(row for row in table.rows if row[0] == said)
    assert row[1:] == ("0.0", "0.0006036", "424,144")  # 603.568 us; 512 tokens on two


def test_what_is_left_of_the_memory() -> None:
    for gigabytes, note in ((1.0, ""), (0.005, "does not fit")):
        machine = Machine(name="m", memory_gb=gigabytes, bandwidth=1e12, rates={"bf16": 1e12}, source="made up")
        lines = {line.name: line for line in plan(Subject(DENSE), machine, Options(**BASE)).lines}
        assert (lines["left"].note, lines["memory"].source) == (note, "made up")
        assert lines["left"].value == 0.95 * gigabytes * 1e9 - 5_242_624


def test_tables() -> None:
    """What is printed of a plan that fits and of one that does not, on two stages."""
    stages = {**BASE, "gpus": 2, "pp": 2, "accumulate": 4, "interleave": 1, "price": 3.6, "tokens": 256e6}
    answer, memory, against, step, run_, *_ = tables(plan(Subject(DENSE), MACHINE, Options(**stages)))
    assert answer.title == "Training dense on 2 x hand"
    assert [row[0] for row in answer.rows[:3]] == ["memory of a GPU", "one step, at least", "the run, at least"]
    assert [row[1] for row in answer.rows[:3]] == ["0.0 of 0.9 GiB", "0.502 ms", "0.00581 days"]
    assert answer.rows[0][2] == "fits"
    assert memory.title == "dense on 2 x hand: the fullest device, pipeline stage 2 of 2"
    assert memory.rows[0] == ("weights", 251_520, "0.000", "0.000", "0.0", "parameters × bytes each")
    assert memory.rows[-1][:4] == ("per device", 3_014_912, "0.003", "0.003")
    assert [row[0] for row in memory.rows] == [
        "weights",
        "gradients",
        "master weights",
        "first moment",
        "second moment",
        "activations",
        "outside the blocks",
        "the loss",
        "per device",
    ]
    assert memory.rows[-2][4] == "0.0"  # of a GB so far
    assert against.title == "It fits"
    assert against.rows == [
        ("device memory", "1.000", "0.931"),
        ("reserve (5%)", "0.050", "0.047"),
        ("training", "0.003", "0.003"),
        ("left over", "0.947", "0.882"),
    ]
    assert step.title == "One step of one device"
    assert [row[:4] for row in step.rows[:5]] == [
        ("computing", "", "", "0.0003983"),
        ("pipeline", "0.000", "3.277e-7", "3.277e-7"),
        ("pipeline bubble", "", "", "9.966e-5"),
        ("optimizer", "", "", "3.521e-6"),
        ("one step, at least", "", "", "0.0005018"),
    ]
    assert step.rows[0][4] == "1 TFLOP/s bf16 at 50%"
    assert step.rows[2][4] == "20.0% of the micro-batches' time, 1f1b"
    assert step.rows[4][4] == "256 tokens, 510,122 tokens/s"  # 256 / 501.84064 us
    # 10^6 steps of 501.84064 us: 0.0058083 days, 2 GPUs for 0.1394 hours at 3.6
    assert [row for row in run_.rows if "at least" in str(row[0])] == [
        ("days, at least", "0.01", "at this layout's step time"),
        ("GPU hours, at least", "0", "the same, of all GPUs"),
        ("money, at least", "1", "at 3.6 per GPU-hour"),
    ]
    assert run_.rows[0] == ("tokens", "256,000,000", "as given")
    alone = tables(plan(Subject(DENSE), replace(MACHINE, memory_gb=0.005), Options(**BASE)))[1:]
    assert alone[0].title == "dense on 1 x hand: the fullest device"
    assert alone[1].title == "It does not fit"
    assert alone[1].rows[-1][0] == "over"
    assert not any("bubble" in str(row[0]) for row in alone[2].rows)
    assert alone[3].rows[0] == ("tokens", "5,029,120", "Chinchilla-optimal")


def test_one_parameter_is_a_number_of_them() -> None:
    assert train(None, MACHINE, parameters=1).state.weights == 2


def changes(name: str, gpu: str, **options: Any) -> list[str]:  # noqa: ANN401
    return [suggestion.change for suggestion in train(name, gpu, **options).suggestions]


@pytest.mark.parametrize("gpu", ["rtx-4090", "rtx-3090", "l4"])
def test_one_24_gb_card_trains_adapters_over_nf4(gpu: str) -> None:
    """Before more cards: 8B in NF4 with every block run again.

    Matrices of the blocks 6,979,321,856 x (1/2 + 1/64 + 1/4,096) bytes = 3.600 GB; table and head 2.101; adapters of
    rank 16, 41,943,040 x 16 bytes = 0.671; 32 inputs of 4,096 x 4,096 x 2 = 1.074; outside 0.069; three logits 6.304.
    """
    found = train("llama-3-8b", gpu).suggestions
    said = [suggestion.change for suggestion in found]
    sparing = "--lora 16 --qlora --checkpointing full"
    assert found[said.index(sparing)].fits
    assert found[said.index(sparing)].per_device_bytes == pytest.approx(13.82e9, rel=1e-3)
    cards = 16 if gpu == "l4" else 8  # of which 22.74 GB each would be needed, and an L4 has 24 less the reserve
    more = next(i for i, change in enumerate(said) if change.startswith(f"--gpus {cards} "))
    assert said.index(sparing) < more
    assert found[more].fits


def test_adapters_that_are_there_are_put_over_nf4() -> None:
    said = changes("llama-3-8b", "rtx-4090", lora=8)
    assert "--qlora --checkpointing full" in said
    assert not any("--lora" in change for change in said)
    assert not any("lora" in change for change in changes("llama-3.1-70b", "rtx-4090", lora=8, qlora=True))


def test_what_leaves_training_as_it_is_comes_before_what_does_not_and_both_before_more_gpus() -> None:
    """8B on one H100 of 80 GB: offloading takes four times as long, eight-bit moments do not."""
    found = train(None, "h100-sxm", parameters=8e9)
    assert [s.change for s in found.suggestions] == [
        "--offload optimizer",
        "--optimizer adamw-8bit",
        "--gpus 2 --zero 3",
    ]
    assert found.suggestions[0].step_seconds > found.suggestions[1].step_seconds


def test_the_gpus_suggested_leave_the_reserve_alone() -> None:
    """8B with ZeRO-3 are 64.0 GB on each of two: too much for 66 GB of which 5% are kept, not for 68 GB."""
    for memory, needed in ((66, 4), (68, 2)):
        machine = Machine(name="m", memory_gb=memory, bandwidth=2e12, rates={"bf16": 3e14}, source="made up")
        said = [s.change for s in train(None, machine, parameters=8e9).suggestions]
        assert f"--gpus {needed} --zero 3" in said


def test_several_changes_together() -> None:
    """Where no single change is enough on the GPUs that there are, those that leave training as it is are combined."""
    found = train("llama-3-8b", "h100-sxm", gpus=4, batch=8)
    first, *others = found.suggestions
    assert first.fits
    assert "--chunked-loss 8" in [suggestion.change for suggestion in others]
    assert first.change.count("--") == 2
    assert not any(s.fits and s.change.count("--") == 1 for s in others)
    asked: dict[str, Any] = {"batch": 8}
    for name, value in re.findall(r"--(\S+) (\S+)", first.change):
        asked["batch" if name == "micro-batch" else name.replace("-", "_")] = int(value) if value.isdigit() else value
    again = train("llama-3-8b", "h100-sxm", gpus=4, **asked)
    assert (again.fits, again.per_device_bytes) == (True, first.per_device_bytes)


def test_as_many_changes_together_as_it_takes() -> None:
    """Weights and gradients are 1,005,824 bytes, what is outside 19,200: with the loss whole, 768,000, or all of the
    activations, 432,128, no two changes leave less than 1,250,000. The third leaves 1,219,072; halves fit 1,200,000.
    """
    three = "--offload optimizer --chunked-loss 8 --checkpointing full"
    for nbytes, change in ((1_250_000, three), (1_200_000, f"{three} --micro-batch 1 --accumulate 2")):
        found = plan(Subject(DENSE), replace(MACHINE, memory_gb=nbytes / 1e9), Options(**{**BASE, "reserve": 0.0}))
        first, *others = found.suggestions
        assert (first.change, first.fits) == (change, True)
        assert all(s.change.startswith("--gpus") for s in others if s.fits)
    assert not any(
        s.fits
        for s in plan(Subject(DENSE), replace(MACHINE, memory_gb=1e-3), Options(**BASE)).suggestions
        if "--gpus" not in s.change and "lora" not in s.change
    )


def test_of_two_changes_together_those_that_cost_least() -> None:
    """Halved micro-batches and sharded state run nothing again; with every block run again it would fit as well."""
    first = train("llama-3-8b", "h100-sxm", gpus=8, batch=4).suggestions[0]
    assert (first.change, first.fits) == ("--zero 3 --micro-batch 2 --accumulate 2", True)
    assert train("llama-3-8b", "h100-sxm", gpus=8, batch=4, zero=3, checkpointing="full").fits


SPARING = ("none", "selective", "full")


@pytest.mark.parametrize(("spec", "gpus", "memory"), [(DENSE, 8, 1.0), (SPARSE, 8, 1.0), (TIED, 6, 0.003)])
def test_search_is_every_layout_tried(spec: Any, gpus: int, memory: float) -> None:  # noqa: ANN401
    """All degrees that multiply to the GPUs, at the same micro-batch and tokens a step, the least checkpointing."""
    machine = Machine(
        name="m", memory_gb=memory, bandwidth=1e12, rates={"bf16": 1e12}, link=MACHINE.link, source="made up"
    )
    options = Options(**{**BASE, "gpus": gpus, "accumulate": 4, "node": 4})
    subject, expected, tried = Subject(spec), {}, 0
    ways = range(1, gpus + 1)
    for tp, pp, cp, dp in product(ways, repeat=4):
        if tp * pp * cp * dp != gpus or tp > 4 or pp > 4 or 32 % cp or 4 * gpus % dp:
            continue
        for ep in ways:
            for zero in (0,) if dp * cp == 1 else (1, 2, 3):
                changed = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "accumulate": 4 * gpus // dp}
                for way in SPARING:
                    try:
                        trial = attempt(
                            subject, machine, Options(**{**asdict(options), **changed, "checkpointing": way})
                        )
                    except InputError:
                        break
                    tried += 1
                    if trial.fits:
                        expected[tp, pp, cp, dp, ep, zero] = (way, trial.step.seconds)
                        break
    found = search(subject, machine, options, most=10**6)
    made = {
        tuple(layout[name] for name in ("tp", "pp", "cp", "dp", "ep", "zero")): (
            one["checkpointing"],
            one["step_seconds"],
        )
        for one in ranked_document(found)["layouts"]
        for layout in (one["layout"],)
    }
    assert made == expected
    for one in ranked_document(found)["layouts"]:
        tokens = 2 * 32 * one["accumulate"] * one["layout"]["dp"]
        assert one["tokens_per_second"] == pytest.approx(tokens / one["step_seconds"])
    assert (found.tried, found.fitting) == (tried, len(expected))
    assert found.trials[0].step.seconds <= 1.01 * min(seconds for _, seconds in expected.values())
    assert len(search(subject, machine, options).trials) == min(20, len(expected))
    assert {trial.step.tokens for trial in found.trials} == {2 * 32 * 4 * gpus}


def test_rings_of_more_than_sixteen_are_not_searched() -> None:
    for gpus, widest in ((32, 16), (17, 1)):
        found = search(Subject(DENSE), MACHINE, Options(gpus=gpus, seq=17 * 32), most=10**6)
        assert max(trial.layout.cp for trial in found.trials) == widest


def test_of_layouts_as_fast_within_a_hundredth_the_simplest_comes_first() -> None:
    """Fewer kinds of parallelism, of as many the one that holds less; sixteen are as fast as each other here."""
    machine = Machine(
        name="m",
        memory_gb=10,
        bandwidth=1e15,
        rates={"bf16": 1e9},
        link=Link(kind="wire", bandwidth=1e15),
        source="made up",
    )
    found = search(Subject(DENSE), machine, Options(**{**BASE, "gpus": 4, "accumulate": 8, "node": 4}), most=10**6)
    same: dict[str, list[tuple[int, int]]] = {}
    for trial in found.trials:
        layout = trial.layout
        kinds = [layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.ep > 1, layout.zero > 0].count(True)
        same.setdefault(f"{trial.step.seconds:.2e}", []).append((kinds, trial.fullest.total))
    assert max(map(len, same.values())) > 10
    assert all(ordered == sorted(ordered) for ordered in same.values())


def test_adapters_are_matrices_to_an_optimizer() -> None:
    """One momentum of 14,848 numbers in fp32; factors of a row and a column for each A and B."""
    for optimizer, pieces in (
        ("muon", {"momentum": 59_392}),
        # A of 4 x 64, down's of 4 x 96; B of 64 (q, o, down), 32 (k, v) or 96 (gate, up) x 4
        ("adafactor", {"row factors": 4 * 4 * (7 * 4 + 448), "column factors": 4 * 4 * (6 * 64 + 96 + 7 * 4)}),
    ):
        made = plan(Subject(DENSE), MACHINE, Options(seq=32, lora=4, optimizer=optimizer))
        assert made.state.optimizer == pieces


def test_half_precision_is_two_bytes_wide() -> None:
    machine = Machine(name="m", memory_gb=1, bandwidth=1e12, rates={"fp16": 1e12}, source="made up")
    made = plan(Subject(DENSE), machine, Options(**{**BASE, "dtype": "fp16"}))
    assert (made.state.weights, made.activation_bytes) == (502_912, 432_128)


def test_eight_bit_moments_by_their_publication() -> None:
    """bitsandbytes: under 4,096 numbers 4 bytes each, otherwise one, and 4 for each 256 (arXiv 2110.02861)."""
    for size, each in ((4095, 16_380), (4096, 4096 + 4 * 16), (4112, 4112 + 4 * 17), (5000, 5000 + 4 * 20)):
        found = train(None, MACHINE, parameters=size, optimizer="adamw-8bit").state.optimizer
        assert found == {"first moment": each, "second moment": each}


def test_a_tied_table_needs_three_gradients_when_all_else_is_gone() -> None:
    """Two tokens: the table's gradient is 128,000 bytes; three of them, less what is freed by then.

    Kept of 2 rows by one block: inputs of norms and mixers 4 x 128, q, k, v and mixed values 4 x 128, up and its
    activation 2 x 512, means and deviations 8, of 2 bytes: 4,112; log-sum-exps 8, of 4 bytes: 32. Of four blocks
    16,576. Outside: inputs of final norm and head 512, mean and deviation 8, numbers of tokens and positions 32: 552.
    """
    stage = plan(Subject(TIED), MACHINE, Options(batch=1, seq=2)).trial.fullest
    assert (stage.activations, stage.outside) == (16_576, 552)
    assert stage.gradient_peak == stage.temporary == 3 * 128_000 - 16_576 - 552
    away = plan(Subject(TIED), MACHINE, Options(batch=1, seq=2, offload="activations")).trial.fullest
    assert away.gradient_peak == 3 * 128_000 - 552
    split = plan(Subject(TIED), MACHINE, Options(batch=1, seq=2, gpus=2, pp=2)).trial
    last = next(stage for stage in split.stages if stage.section.stage.last)
    assert last.gradient_peak == 128_000 + 2 * 1000 * 2  # one beside the old one, and the logits' in bf16


def test_the_whole_document() -> None:
    """Keys and their places, of a plan worked out in test_training_by_hand.py."""
    found = document(plan(Subject(DENSE), MACHINE, Options(**{**BASE, "gpus": 4, "zero": 1})))
    assert found.keys() == {
        "fits",
        "not_counted",
        "model",
        "gpu",
        "gpus",
        "parameters",
        "ladder",
        "state_bytes",
        "activation_bytes",
        "logits_bytes",
        "per_device_bytes",
        "host_bytes",
        "memory_bytes",
        "reserve_bytes",
        "flops_total",
        "flops_per_token",
        "unit",
        "tokens",
        "chinchilla_tokens",
        "days",
        "days_of_layout",
        "gpu_hours",
        "published_run",
        "money",
        "layout",
        "stage",
        "step",
        "communication",
        "suggestions",
        "options",
        "conventions",
        "assumptions",
    }
    assert (found["fits"], found["model"], found["gpu"], found["gpus"]) == (True, "dense", "hand", 4)
    assert found["conventions"].keys() == {
        "not_counted",
        "per_device_bytes",
        "ladder",
        "state_bytes",
        "activation_bytes",
        "logits_bytes",
        "unit",
        "flops_total",
        "flops",
        "days",
        "gpu_hours",
        "step",
        "mfu",
        "communication",
        "layout",
        "batch",
        "units",
    }
    assert found["parameters"] == {"total": 251_456, "active": 251_456}
    assert found["state_bytes"] == {
        "weights": 502_912,
        "gradients": 502_912,
        "master": 251_456,
        "optimizer": 502_912,
        "optimizer_pieces": {"first moment": 251_456, "second moment": 251_456},
        "total": 1_760_192,
    }
    assert found["money"] is None
    assert found["layout"] == {"dp": 4, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "zero": 1, "hsdp": None}
    assert found["stage"] == {"fullest": 0, "micro_batches_in_flight": 1}
    assert [(line["line"], line["bytes"], line["running_bytes"]) for line in found["ladder"]] == [
        ("weights", 502_912, 502_912),
        ("gradients", 502_912, 1_005_824),
        ("master weights", 251_456, 1_257_280),
        ("first moment", 251_456, 1_508_736),
        ("second moment", 251_456, 1_760_192),
        ("activations", 432_128, 2_192_320),
        ("outside the blocks", 19_200, 2_211_520),
        ("the loss", 768_000, 2_979_520),
    ]
    assert found["step"] == {
        "seconds": pytest.approx(151.772096e-6),
        "tokens": 256,
        "tokens_per_second": pytest.approx(256 / 151.772096e-6),
        "modelled_seconds": pytest.approx(151.772096e-6),
        "compute_seconds": pytest.approx(150.011904e-6),
        "computing_seconds": {},
        "efficiency": 0.5,
        "schedule": "1f1b",
        "bubble": 0,
        "chunks_of_a_stage": 1,
        "waiting_for_data_seconds": 0,
        "optimizer_seconds": pytest.approx(1.760192e-6),
        "breakdown_seconds": {
            "computing": pytest.approx(150.011904e-6),
            "tensor": 0,
            "expert": 0,
            "pipeline": 0,
            "context": 0,
            "bubble": 0,
            "data": 0,
            "offload": 0,
            "optimizer": pytest.approx(1.760192e-6),
        },
        "mfu": {
            "6ND": pytest.approx(96_559_104 / 151.772096e6),
            "exact": pytest.approx(78_053_376 / 151.772096e6),
            "exact_causal": pytest.approx(75_005_952 / 151.772096e6),
        },
    }
    data = found["communication"]["data"]
    assert data["bytes"] == 754_368
    assert data["seconds"] == pytest.approx(75.4368e-6)
    assert data["formula"] == "(n-1)/n x (gradients + trained weights)"
    assert data["source"] == "as given"
    near = document(plan(Subject(DENSE), MACHINE, Options(**{**BASE, "gpus": 2})))["communication"]
    assert near["data"]["source"] == "wire, made up"
    far = document(plan(Subject(DENSE), MACHINE, Options(batch=2, seq=32, gpus=16, offload="optimizer")))
    assert far["communication"]["data"]["source"].startswith("82% of 50 GB/s per GPU between nodes")
    assert far["communication"]["offload"]["source"].startswith("25 GB/s between a GPU and host memory")
