"""LoRA adapters beside a model: bytes, traffic and FLOPs, worked out by hand.

The model is that of test_serving_by_hand: 4 layers; q from 64 to 96, k and v to 48, o from 96 to 64, gate and up from
64 to 160, down back. Of rank 1 an adapter has d_in + d_out numbers for each: 160 + 112 + 112 + 160 + 3 x 224 = 1,216
a layer. On one of two devices q, k, v, gate and up have half their outputs, o and down half their inputs:
112 + 88 + 88 + 112 + 144 + 144 + 144 = 832.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_serving_by_hand import CONVENTIONS, DENSE, MACHINE, SPARSE

from asbuilt import InputError
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve.workload import Workload

ASKED: dict[str, Any] = {"context": 96, "prompt": 96, "chunk": 96, "conventions": CONVENTIONS}


def ask(rate: float = 1e18, **asked: Any) -> ServePlan:  # noqa: ANN401
    return serve(DENSE, replace(MACHINE, rates={"bf16": rate}), **ASKED | asked)


@pytest.mark.parametrize(("tp", "each"), [(1, 1216), (2, 832)])
def test_bytes_are_reserved_for_each(tp: int, each: int) -> None:
    many, rank = random.randint(1, 9), random.randint(1, 40)
    plan, without = (ask(tp=tp, users=1, **lora) for lora in ({"lora": many, "lora_rank": rank}, {}))
    line = next(line for line in plan.ladder if line.name == "LoRA adapters")
    assert line.value == many * 4 * each * rank * 2
    assert without.kv_budget_bytes - plan.kv_budget_bytes == line.value
    assert plan.document()["lora"] == {"adapters": many, "rank": rank, "targets": None, "bytes": line.value}
    assert plan.weight_bytes == without.weight_bytes
    stages = ask(pp=2, users=1, lora=many, lora_rank=rank).ladder
    assert next(line for line in stages if line.name == "LoRA adapters").value == many * 2 * 1216 * rank * 2


def test_a_step_reads_as_many_as_it_has_sequences() -> None:
    many, rank, users = random.randint(2, 5), random.randint(1, 9), random.randint(1, 8)
    plan, without = (ask(users=users, **lora) for lora in ({"lora": many, "lora_rank": rank}, {}))
    assert plan.decode is not None
    assert without.decode is not None
    read = min(many, users) * 4 * 1216 * rank * 2
    wanted = without.decode.seconds_per_step + read / 1e9
    assert plan.decode.seconds_per_step == pytest.approx(wanted, rel=1e-12)


def test_a_token_computes_one() -> None:
    """On a machine so slow that every part is bound by its rate, a prompt takes 2 FLOPs a number and token more."""
    rank = random.randint(1, 9)
    plan, without = (ask(rate=1e6, users=1, **lora) for lora in ({"lora": 3, "lora_rank": rank}, {}))
    wanted = without.prefill.seconds + 2 * 96 * 4 * 1216 * rank / 1e6
    assert plan.prefill.seconds == pytest.approx(wanted, rel=1e-12)


def test_targets_and_a_published_size() -> None:
    plan = ask(users=1, lora=1, lora_rank=2, lora_targets=("q", "down"))
    assert next(line for line in plan.ladder if line.name == "LoRA adapters").value == 4 * (160 + 224) * 2 * 2
    # all linear layers of Llama 3 8B at rank 16: 41,943,040 trainable parameters, as PEFT prints
    llama = serve("llama-3-8b", "h100-sxm", lora=1, lora_rank=16, engine="vllm-0.19")
    assert next(line for line in llama.ladder if line.name == "LoRA adapters").value == 2 * 41_943_040
    assert "--enable-lora --max-loras 1 --max-lora-rank 16" in llama.command
    quantised = serve("gpt-oss-20b", "h100-sxm", lora=2, lora_rank=8, users=1)
    assert quantised.fits
    assert serve(SPARSE, MACHINE, lora=1, lora_rank=1, **ASKED).capacity.adapters is not None


def test_a_workload_is_simulated_with_them() -> None:
    workload = Workload(lengths=((60, 20),), users=4, requests=40)
    times = []
    for lora in ({}, {"lora": 4, "lora_rank": 32}):
        served = ask(workload=workload, context=None, prompt=None, **lora).served
        assert served is not None
        middle = served["middle"]
        assert middle is not None
        times.append(middle.first_token.median)
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"lora": 1}, "lora-rank"),
        ({"lora_rank": 4}, "lora-rank"),
        ({"lora_targets": ("q",)}, "lora-targets"),
        ({"lora": 0, "lora_rank": 4}, "lora"),
        ({"lora": 1, "lora_rank": 0}, "lora-rank"),
        ({"lora": 1, "lora_rank": 4, "lora_targets": ("query",)}, "lora-targets"),
        ({"lora": 1, "lora_rank": 4, "lora_targets": ("blocks.0.*",)}, "lora-targets"),
        ({"lora": 1, "lora_rank": 1000}, "lora-rank"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        ask(**asked)
    assert error.value.field == field
