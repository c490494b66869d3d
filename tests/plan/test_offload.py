"""Layers and experts in host memory: bytes, traffic and times of both machines, worked out by hand.

The model is that of test_serving_by_hand, with experts: V = 1,000, M = 64, 8 heads of 12 with 4 key/value heads, 8
experts of 40 of which 2 are chosen, in bf16. Bytes of one block: attention 36,864, norms 256, router 1,024, experts
8 x 3 x 40 x 64 x 2 = 122,880; a token's cache 192. Embedding and head have 128,000 each, the last norm 128.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_serving_by_hand import CONVENTIONS, MACHINE, SPARSE, model

from asbuilt import InputError
from asbuilt.catalog.machine import Machine
from asbuilt.plan import ServePlan, serve
from asbuilt.plan.serve.workload import Workload
from asbuilt.spec import GatedMLP, MixtureOfExperts

FAST = replace(MACHINE, rates={"bf16": 1e18})  # bound by memory
CPU = Machine(name="slow", kind="cpu", memory_gb=0.01, bandwidth=2.5e8, rates={"bf16": 1e18})
DENSE, EXPERTS, HEAD, CACHE = 36_864 + 256 + 1_024, 122_880, 128_000 + 128, 192


def ask(layers: int = 4, **asked: Any) -> ServePlan:  # noqa: ANN401
    body = SPARSE.blocks[0].branches[1].body
    assert isinstance(body, MixtureOfExperts)
    settings = {"context": 96, "prompt": 96, "chunk": 96, "conventions": CONVENTIONS, "cpu": CPU, "users": 1}
    return serve(model(body, layers), FAST, **settings | asked)


def test_bytes_and_times_are_those_of_both() -> None:
    """Of one sequence: weights once, of each layer's experts two in eight, and the cache of 96 tokens."""
    layers = random.randint(3, 8)
    on_card = random.randint(2, layers)  # the output and so many blocks less one
    above = layers + 1 - on_card
    experts = random.randint(above + 1, layers)
    below, crossing, whole = on_card - 1, experts - above, layers - experts
    assert below == crossing + whole
    plan = ask(layers, gpu_layers=on_card, cpu_moe=experts)
    card, host = below * DENSE + whole * EXPERTS + HEAD, 128_000 + above * DENSE + experts * EXPERTS
    found = plan.document()["offload"]
    assert (plan.weight_bytes, found["weight_bytes"]) == (card, host)
    assert plan.capacity.per_user(plan.capacity.device.stages[0], 96) == 96 * below * CACHE
    assert found["cache_bytes_per_user"] == 96 * above * CACHE
    crossed = 2 * 64 * (1 + 2 * crossing)  # bf16 numbers of one token: the stream, and to experts and back
    assert found["crossing_bytes_per_step"] == crossed
    read = below * (DENSE + 96 * CACHE) + whole * EXPERTS / 4 + HEAD
    read_there = 128 + above * (DENSE + 96 * CACHE) + experts * EXPERTS / 4
    seconds = found["seconds_per_step"]
    wanted = {"device": read / 1e9, "host": read_there / 2.5e8, "bus": crossed / 25e9}
    assert seconds == pytest.approx(wanted, rel=1e-12)
    assert plan.decode is not None
    assert plan.decode.seconds_per_step == pytest.approx(sum(wanted.values()), rel=1e-12)
    # data-centre cards reach 0.7 of their bandwidth, processors 0.6, links 0.55, in the middle
    expected = read / 0.7e9 + read_there / 1.5e8 + crossed / (0.55 * 25e9)
    assert plan.expected["middle"][1] == pytest.approx(expected, rel=1e-12)
    assert plan.document()["expected"]["middle"]["seconds_per_step"] == pytest.approx(expected, rel=1e-12)


def test_a_prompt_is_computed_on_both() -> None:
    """2 FLOPs a weight and token at each machine's rate; of the experts two of eight, the head for one token alone."""
    slow, slower = replace(FAST, rates={"bf16": 4e9}), replace(CPU, rates={"bf16": 1e9})
    body = SPARSE.blocks[0].branches[1].body
    assert isinstance(body, MixtureOfExperts)
    settings: dict[str, Any] = {"context": 96, "prompt": 96, "chunk": 96, "conventions": CONVENTIONS}
    whole, there = (serve(model(body), machine, **settings) for machine in (slow, slower))
    both = serve(model(body), slow, cpu_moe=4, cpu=slower, **settings)
    flops = 96 * 4 * (2 * 3 * 40 * 64 * 2)  # of experts: 3 matrices of 40 x 64, for 2 of them
    rows = 96 * 128  # bytes of a stream's numbers, and of the embedding's rows
    moved = flops * (1 / 1e9 - 1 / 4e9) + rows * (1 / 2.5e8 - 1 / 1e9) + 9 * rows / 25e9
    assert both.prefill.seconds == pytest.approx(whole.prefill.seconds + moved, rel=1e-12)
    assert both.prefill.seconds < there.prefill.seconds


def test_users_fit_in_both() -> None:
    """The host keeps 0.9 of 10 MB: 9,000,000 - weights, over its layers' cache of 96 tokens."""
    plan = ask(gpu_layers=2, users=None)
    host = 128_000 + 3 * (DENSE + EXPERTS)
    in_host = (9_000_000 - host) // (96 * 3 * CACHE)
    assert plan.document()["offload"]["users_that_fit"] == in_host == plan.users
    assert plan.users_that_fit == in_host
    small = ask(gpu_layers=2, users=None, cpu=replace(CPU, memory_gb=host / 0.9e9 - 1e-6))
    assert (small.users, small.fits) == (0, False)
    more = ask(gpu_layers=4, users=None)
    alone = more.capacity.in_group(more.capacity.device.stages[0], 96)
    assert alone == more.users
    assert alone < more.capacity.in_host(96)


def test_all_layers_or_more_are_all_but_the_embedding() -> None:
    for layers in (5, 999):
        plan = ask(gpu_layers=layers)
        assert plan.document()["offload"]["weight_bytes"] == 128_000
        assert plan.document()["offload"]["gpu_layers"] == 5
    assert ask(cpu=None).document()["offload"] is None


def test_the_command_and_the_document_say_it() -> None:
    plan = ask(gpu_layers=3, cpu_moe=4, engine="llama.cpp", conventions={"workspace": 50_000.0})
    assert "--n-gpu-layers 3 --n-cpu-moe 4 --flash-attn on" in plan.command
    assert "Host memory, slow" in plan.markdown()
    assert {c["where"] for c in plan.document()["components"]} == {"device", "host"}
    assert "ffn (host)" in plan.explain()
    assert ask(gpu_layers=3).document()["smallest_count"] == 1  # of cards alone


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"cpu_moe": 2, "cpu": None}, "cpu"),
        ({}, "cpu"),
        ({"cpu_moe": 2, "cpu": MACHINE}, "cpu"),
        ({"gpu_layers": 0}, "ngl"),
        ({"gpu_layers": -1}, "ngl"),
        ({"cpu_moe": 5}, "n-cpu-moe"),
        ({"gpu_layers": 2, "cpu_moe": 3}, "n-cpu-moe"),  # whose blocks are in host memory
        ({"gpu_layers": 2, "gpus": 2}, "ngl"),
        ({"gpu_layers": 2, "engine": "vllm-0.19"}, "ngl"),
        ({"gpu_layers": 2, "workload": Workload(lengths=((10, 10),), users=1)}, "ngl"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        ask(**asked)
    assert error.value.field == field


def test_models_without_experts_and_searches_are_refused() -> None:
    dense = model(GatedMLP(d_model=64, d_ff=160, activation="silu"))
    with pytest.raises(InputError, match="no experts"):
        serve(dense, FAST, cpu_moe=1, cpu=CPU)
    with pytest.raises(InputError, match="searched"):
        _ = ask(gpu_layers=2).layouts
