"""Expected steps, schedules, groups that shard, fp8, experts and frameworks' checkpointing, worked out by hand.

Model and machine are those of test_training_by_hand.py, at the assumptions' efficiencies: products reach 77% of 80.3%
of 10^12 FLOP/s, scores half, memory 90% of 10^12 bytes/s and links 82% of their rates.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from test_training_by_hand import BASE, DENSE, MACHINE, SPARSE

from asbuilt.catalog.machine import Machine
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.plan import Options, Subject, TrainPlan
from asbuilt.plan.train import schedule
from asbuilt.plan.train.efficiency import reached
from asbuilt.plan.train.options import stepping
from asbuilt.plan.train.plan import plan
from asbuilt.plan.train.published import RUNS, nearest
from asbuilt.plan.train.search import search
from asbuilt.spec import Model

PRODUCTS, SCORES, MEMORY = 0.77 * 0.803 * 1e12, 0.5e12, 0.9e12
# Forward: four blocks' products with weights, the head's; four blocks' scores and mixing, masked pairs skipped.
BLOCKS, HEAD, MIXED = 4 * 3_932_160, 8_192_000, 4 * 270_336
# Saved by the blocks and outside them, but for token numbers and RoPE tables; and three logits, written and read.
SAVED, OUTSIDE, LOSS = 432_128, 16_640, 2 * 768_000


def made(model: Model = DENSE, machine: Machine = MACHINE, **options: Any) -> TrainPlan:  # noqa: ANN401
    return plan(Subject(model), machine, Options(**{**BASE, "kernel_efficiency": None, **options}))


def test_an_expected_step() -> None:
    """Products and scores forward and backward, fused attention 2.5 times; five passes over saved tensors."""
    step = made().trial.step
    assert step.computing == {
        "products": pytest.approx(3 * (BLOCKS + HEAD) / PRODUCTS),
        "scores": pytest.approx(3.5 * MIXED / SCORES),
        "passes": pytest.approx((5 * (SAVED + OUTSIDE) + LOSS) / MEMORY),
    }
    assert step.optimizer_seconds == pytest.approx(28 * 251_456 / MEMORY)
    assert step.seconds == pytest.approx(sum(step.computing.values()) + step.optimizer_seconds)


def test_what_is_recomputed_takes_time() -> None:
    """Full: every block's products and scores again, and two passes over what is not kept, all but four inputs."""
    step, none = made(checkpointing="full").trial.step.computing, made().trial.step.computing
    assert step["products"] - none["products"] == pytest.approx(BLOCKS / PRODUCTS)
    assert step["scores"] - none["scores"] == pytest.approx(MIXED / SCORES)
    assert step["passes"] - none["passes"] == pytest.approx(2 * (SAVED - 4 * 8_192) / MEMORY)


def test_torchtitan_s_list_of_operations() -> None:
    """Kept of a block: its input, q, v, gate and down of q k v o gate up down, and attention's result with its sums.

    8,192 each of 64 x 64 numbers, v 4,096, gate 12,288; 64 rows of 4 heads of 16 numbers and a float32: 9,216. k, o
    and up are multiplied again.
    """
    found, none = made(checkpointing="torchtitan-op"), made()
    assert found.activation_bytes == 4 * (8_192 + 8_192 + 4_096 + 12_288 + 8_192 + 9_216)
    again = 4 * 64 * 2 * (32 * 64 + 64 * 64 + 96 * 64)
    there, before = found.trial.step.computing, none.trial.step.computing
    assert there["products"] - before["products"] == pytest.approx(again / PRODUCTS)
    assert there["scores"] == before["scores"]


def test_torchtitan_s_list_with_tensor_parallelism() -> None:
    """What is summed is kept in halves of tokens: the input and down; the others in halves of columns."""
    assert made(gpus=2, tp=2, checkpointing="torchtitan-op").activation_bytes == 4 * 50_176 // 2


def test_megatron_s_selective_recomputation() -> None:
    """2 x 4 x 32 x 32 scores a block are in memory, 5 bytes each, 5 + 2 times; all pairs, forward twice, no fusing."""
    found, none = made(checkpointing="megatron-selective"), made()
    assert found.activation_bytes == none.activation_bytes
    there, before = found.trial.step.computing, none.trial.step.computing
    assert there["scores"] == pytest.approx(4 * 4 * 524_288 / SCORES)
    assert there["passes"] - before["passes"] == pytest.approx(4 * 7 * 5 * 8_192 / MEMORY)


def test_small_products_wait_for_the_memory() -> None:
    """One sequence of one token: a weight's bytes take longer than its FLOPs."""
    step = made(batch=1, seq=1, machine=replace(MACHINE, bandwidth=1e11)).trial.step
    numbers = 4 * (12_288 + 18_432) + 64_000 + 4 * (2 * 128 + 2 * 96 + 3 * 160) + 1_064
    assert step.computing["products"] == pytest.approx(3 * 2 * numbers / (MEMORY / 10))


def test_a_device_reads_its_own_experts() -> None:
    """With a memory so slow that every product waits for it: three quarters of 294,912 numbers less, three times."""
    slow = replace(MACHINE, bandwidth=1e9)
    one, four = (made(SPARSE, slow, gpus=4, ep=ep).trial.step.computing["products"] for ep in (1, 4))
    assert one - four == pytest.approx(3 * 2 * 0.75 * 294_912 / (MEMORY / 1000))


def test_fp8() -> None:
    """Products of blocks at 77% of 73.4% of fp8's rate, 8 bytes for every number of their factors and results."""
    machine = replace(MACHINE, rates={"bf16": 1e12, "fp8": 2e12})
    there, before = (made(machine=machine, fp8=fp8).trial.step.computing for fp8 in (True, False))
    narrow = 0.77 * 0.734 * 2e12
    assert there["products"] == pytest.approx(3 * (BLOCKS / narrow + HEAD / PRODUCTS))
    numbers = 4 * (12_288 + 18_432 + 64 * (2 * 128 + 2 * 96 + 3 * 160))
    assert there["passes"] - before["passes"] == pytest.approx(8 * numbers / MEMORY)
    with pytest.raises(InputError, match="fp8: no rate is known for fp8 on hand"):
        made(fp8=True)


@pytest.mark.parametrize(
    ("way", "idle", "first", "last"),
    [("1f1b", 7.0, 8, 1), ("zb-h1", 7 / 3, 8, 1), ("zb-v", 0.0, 16, 16), ("dualpipe", 2.0, 9, 9)],
)
def test_schedules(way: schedule.Schedule, idle: float, first: int, last: int) -> None:
    """Eight stages and twenty micro-batches; ZB-V's are halves. With F = 1, B = 2, W = 1, of three units each:

    1F1B (p-1)(F+B) = 21, ZB-H1 (p-1)(F+B-2W) = 7, DualPipe (p/2-1)(F&B+B-3W) = 6 (arXiv 2412.19437, table 2).
    """
    chunks = 2 if way == "zb-v" else 1
    assert schedule.idle(way, 8, chunks) == pytest.approx(idle)
    assert schedule.held(way, 0, 8, chunks, 20) == first
    assert schedule.held(way, 7, 8, chunks, 20) == last


def test_dualpipe_holds_two_stages_and_hides_the_pipeline() -> None:
    options: dict[str, Any] = {"gpus": 2, "pp": 2, "accumulate": 4, "zero": 0}
    dual, plain = made(schedule="dualpipe", **options).trial, made(schedule="1f1b", **options).trial
    assert dual.fullest.state.total == 2 * plain.fullest.state.total
    assert dual.step.idle == 0
    assert dual.step.breakdown["pipeline"] == pytest.approx(20 / 132 * plain.step.breakdown["pipeline"])
    # the head's stage and the table's, each for half of the micro-batches
    assert dual.step.computing["products"] == pytest.approx(3 * (BLOCKS + HEAD) / 2 / PRODUCTS)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gpus": 2, "pp": 2, "accumulate": 3, "schedule": "dualpipe"}, "schedule"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"gpus": 2, "pp": 2, "accumulate": 4, "schedule": "1f1b", "interleave": 2}, "interleave"),
        ({"gpus": 4, "zero": 3, "hsdp": 3}, "hsdp"),
        ({"gpus": 4, "hsdp": 2}, "hsdp"),
        ({"expert_nodes": 0}, "expert_nodes"),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        made(**options)
    assert error.value.field == field


def test_groups_that_shard() -> None:
    """Pairs shard, two pairs average: half of 2 x 502,912 - 256,128 + 502,912, and 2 x 1/2 of half the gradients."""
    found = made(gpus=4, zero=3, hsdp=2)
    assert found.state.weights == 251_456
    assert found.trial.step.data.bytes == 626_304 + 251_456
    assert found.trial.step.data.seconds == pytest.approx(626_304 / 82e9 + 251_456 / 8.2e9)
    assert made(gpus=4, zero=3).state.weights == 125_728


def test_a_pipeline_s_stage_gathers_its_weights_once_a_step() -> None:
    """Two ranks share each stage. The first has the table, 64,000, and two blocks, 61,696: 125,696 parameters."""
    found = made(gpus=4, pp=2, zero=3, accumulate=4, interleave=1)
    first = found.trial.stages[0]
    assert (first.gathered, first.scattered) == (125_696, 125_696)  # 2 bytes each, beyond the half that it has
    last = 61_696 + 64_064
    assert found.trial.step.data.bytes == (2 + 2) * last // 2
    assert found.trial.step.data.formula.endswith("once a step")


def test_rows_go_to_experts() -> None:
    """64 rows of two experts each, 64 wide, in four blocks, three quarters of them elsewhere; forward and backward.

    There in fp8, 1 1/32 bytes a number, back in 2. With one node a token, half of the 64 rows leave it, once.
    """
    options: dict[str, Any] = {"gpus": 4, "ep": 4}
    rows, once = 4 * 128 * 64, 4 * 64 * 64
    assert made(SPARSE, **options).trial.step.expert.bytes == 0.75 * rows * (2 + 2) * 2
    narrow = made(SPARSE, **options, fp8_dispatch=True).trial.step.expert
    assert narrow.bytes == round(0.75 * rows * (1 + 1 / 32 + 2) * 2)
    near = made(SPARSE, **options, expert_nodes=1).trial.step.expert
    assert near.bytes == 0.5 * once * 4 * 2
    assert near.seconds == pytest.approx(max(near.bytes / 8.2e9, 0.75 * rows * 4 * 2 / 82e9))
    hidden = made(SPARSE, **options, expert_nodes=1, overlap_experts=True).trial.step
    assert hidden.breakdown["expert"] == pytest.approx(20 / 132 * near.seconds)


def test_sums_that_overlap_with_products() -> None:
    plain, hidden = (made(gpus=2, tp=2, overlap_tensor=overlap).trial.step for overlap in (False, True))
    assert hidden.tensor.bytes == plain.tensor.bytes
    assert hidden.breakdown["tensor"] == pytest.approx(20 / 132 * plain.breakdown["tensor"])


def test_interruptions_are_in_the_run_and_not_in_the_step() -> None:
    """A step of 64 tokens; nine tenths of the time are steps, but in a lower bound, and at a given utilisation."""
    found = made(tokens=64e6)
    assert found.days == pytest.approx(1e6 * found.trial.step.seconds / 86400 / 0.9)
    assert found.gpu_hours == pytest.approx(24 * found.days)
    assert made(tokens=64e6, effective_time=1.0).days == pytest.approx(0.9 * found.days)
    given: tuple[dict[str, Any], ...] = ({"kernel_efficiency": 0.5}, {"utilisation": 0.5})
    for options in given:
        lower = made(tokens=64e6, **options)
        assert lower.days == pytest.approx(1e6 * lower.trial.step.seconds / 86400)


def test_a_kernel_of_attention() -> None:
    """The parts of a step that are not scores take what they took; half as fast as 0.5, scores take twice as long."""
    ways: tuple[dict[str, Any], ...] = ({}, {"attention_efficiency": 0.5}, {"attention_efficiency": 0.25})
    usual, given, half = (made(**options).trial.step for options in ways)
    assert given.seconds == usual.seconds
    again = made(attention_efficiency=0.125).trial.step
    assert again.seconds - half.seconds == pytest.approx(2 * (half.seconds - given.seconds))
    assert half.seconds > given.seconds


def test_a_padded_vocabulary() -> None:
    """1,000 rows to 1,024, a multiple of 128, and with two ranks of 256."""
    assert made(pad_vocabulary=128).state.weights == 502_912 + 2 * 2 * 24 * 64
    assert made(pad_vocabulary=128).logits_bytes == 64 * 1024 * 4
    assert made(pad_vocabulary=300, gpus=2, tp=2).logits_bytes == 64 * 1200 * 4 // 2
    assert made(pad_vocabulary=128).parameters == 251_456


def test_tokens_of_a_step() -> None:
    options = Options(gpus=4, batch=2, seq=32)
    assert stepping(options, 1024).accumulate == 4
    for tokens, given in ((1000, False), (1024, True)):
        with pytest.raises(InputError, match="tokens_per_step"):
            stepping(options, tokens, given=given)


def test_search_tries_micro_batches_at_the_same_tokens() -> None:
    options = Options(**{**BASE, "kernel_efficiency": None, "gpus": 2, "batch": 1, "accumulate": 8})
    found = search(Subject(DENSE), MACHINE, options, most=10**6, batches=(1, 2, 4))
    assert {trial.options.batch for trial in found.trials} == {1, 2, 4}
    assert {trial.step.tokens for trial in found.trials} == {512}


def test_rates_that_were_measured_are_taken_as_they_are() -> None:
    assert reached(replace(MACHINE, source="measured: a CPU")).products == 1
    assert reached(replace(MACHINE, name="a100-80gb", vendor="NVIDIA")).products == pytest.approx(0.77 * 0.859)


def test_published_runs() -> None:
    """6 x 68.977e9 x 2e12 / (1,720,320 x 3,600 x 312e12) = 42.8%; the nearest in size, on the same generation."""
    large = next(run for run in RUNS if run.name == "Llama-2-70B")
    assert large.mfu == pytest.approx(0.428, abs=5e-4)
    named = replace(MACHINE, name="a100-80gb")
    assert [nearest(named, n).name for n in (1e9, 12e9, 3e11)] == ["Llama-2-7B", "Llama-2-13B", "Llama-2-70B"]
    assert nearest(replace(MACHINE, name="h200"), 3e11).name == "Llama-3.1-405B"
    found = made(tokens=1e9)
    assert found.published_hours == pytest.approx(found.flops_total / (1e12 * found.published.mfu) / 3600)


def test_the_answer_stands_first() -> None:
    words = ("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", "--gpus", "8", "--zero", "3", "--tokens", "15T")
    said = CliRunner().invoke(cli, [*words, "--tokens-per-step", "1048576"])
    assert said.exit_code == 0
    lines = [line for line in said.stdout.splitlines() if line.strip()]
    assert lines[0].startswith("Training llama-3-8b on 8 x h100-sxm")
    assert "memory of a GPU" in lines[2]
    found = json.loads(CliRunner().invoke(cli, [*words, "--tokens-per-step", "1048576", "--json"]).stdout)
    assert found["step"]["tokens"] == 1_048_576
    assert found["step"]["modelled_seconds"] == found["step"]["seconds"]
