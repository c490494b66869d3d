"""Replicas of routed experts: bytes and traffic by hand, EPLB's placement by a plain one, and what is refused."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from asbuilt import InputError
from asbuilt.catalog import find
from asbuilt.cli.main import cli
from asbuilt.plan.serve import ServePlan, serve
from asbuilt.plan.serve.expert_loads import balanced, in_order, read_loads
from asbuilt.plan.serve.place import place
from asbuilt.spec import MixtureOfExperts, Pass, walk

SEED = random.SystemRandom().randrange(2**31)
LAYERS, MANY, TOP = 48, 128, 8  # of qwen3-30b-a3b
EXPERT = 3 * 2048 * 768 * 2
WORDS = ("plan", "serve", "qwen3-30b-a3b", "--gpu", "h100-sxm")


def ask(redundant: int | None = None, *, ep: int = 8, gpus: int | None = None, **options: object) -> ServePlan:
    asked = {"gpus": gpus or ep, "tp": 1, "pp": 1, "ep": ep, "context": 2048, "dtype": "bf16"} | options
    return serve("qwen3-30b-a3b", "h100-sxm", redundant_experts=redundant, **asked)  # type: ignore[arg-type]


def test_a_device_holds_its_share_of_the_replicas_to_the_byte() -> None:
    ep = random.Random(SEED).choice((2, 4, 8, 16))
    redundant = ep * random.Random(SEED).randint(1, 9)
    plain, more = ask(ep=ep, users=1), ask(redundant, ep=ep, users=1)
    added = LAYERS * EXPERT * redundant // ep
    assert more.weight_bytes - plain.weight_bytes == added, (SEED, ep, redundant)
    found = more.document()["experts"]
    assert (found["replica_bytes"], found["on_a_device"]) == (added, (MANY + redundant) // ep)
    assert plain.document()["experts"] is None
    assert plain.kv_budget_bytes - more.kv_budget_bytes == added
    assert more.document()["layout"]["redundant_experts"] == redundant


def test_replicas_make_up_for_devices_that_do_not_divide_the_experts() -> None:
    """128 + 16 experts on 36 devices: four each, where 128 alone are not divided."""
    plan = ask(16, ep=36)
    whole = ask(ep=1).weight_bytes
    assert plan.weight_bytes == whole - LAYERS * EXPERT * (MANY - 4)
    assert plan.document()["experts"]["busiest_over_mean"]["without"] is None
    with pytest.raises(InputError, match="ep: does not divide the experts"):
        ask(ep=36)


def test_each_replica_is_read_as_often_as_rows_are_sent_to_it() -> None:
    """A second count: rows that choose experts and one of their replicas at random."""
    drawn = random.Random(SEED)
    part = next(part for _, part in walk(find("qwen3-30b-a3b").spec()) if isinstance(part, MixtureOfExperts))
    rows, replicas, trials = drawn.randint(2, 40), drawn.randint(2, 4), 400
    read = 0
    for _ in range(trials):
        chosen = ((e, drawn.randrange(replicas)) for _ in range(rows) for e in drawn.sample(range(MANY), TOP))
        read += len(set(chosen))
    share = float(part.share("up", Pass(tokens=rows), replicas))
    assert share == pytest.approx(read / trials / (MANY * replicas), rel=0.03), SEED
    assert part.share("up", Pass(tokens=1), replicas) == Fraction(TOP, MANY * replicas)


@pytest.mark.parametrize("redundant", [32, 128, 160])
def test_a_step_reads_the_replicas_that_its_rows_need(redundant: int) -> None:
    """Of one row as much as without replicas; of many everything that is held; in between what the rows hit."""
    plain, more = ask(), ask(redundant)

    def read(plan: ServePlan, rows: int) -> int:
        return plan.roofline.weights(plan.capacity.device.stages[0], Pass(tokens=1, batch=rows))["ffn"]

    assert read(more, 1) - read(plain, 1) > 0  # eight rows on eight groups: replicas of an expert are hit apart
    assert read(more, 10**6) - read(plain, 10**6) == pytest.approx(LAYERS * EXPERT * redundant / 8, rel=1e-9)
    batch = random.Random(SEED).randint(1, 30)
    hits = batch * 8  # rows of all groups
    each, extra = divmod(MANY + redundant, MANY)
    held = {each: MANY - extra, each + 1: extra}
    slots = sum(n * r * (1 - (1 - TOP / MANY / r) ** hits) for r, n in held.items())
    alone = MANY * (1 - (1 - TOP / MANY) ** hits)
    assert read(more, batch) - read(plain, batch) == pytest.approx(LAYERS * EXPERT * (slots - alone) / 8, rel=1e-6)


def greedy(loads: list[float], redundant: int, ep: int) -> float:
    """EPLB as its paper says it, without heaps."""
    replicas = [1] * len(loads)
    for _ in range(redundant):
        replicas[max(range(len(loads)), key=lambda i: (loads[i] / replicas[i], -i))] += 1
    parts = sorted((load / n for load, n in zip(loads, replicas, strict=True) for _ in range(n)), reverse=True)
    devices: list[list[float]] = [[] for _ in range(ep)]
    for part in parts:
        min((d for d in devices if len(d) < len(parts) // ep), key=sum).append(part)
    return max(map(sum, devices)) * ep / sum(loads)


def test_replicas_are_placed_as_eplb_places_them() -> None:
    drawn = random.Random(SEED)
    for _ in range(20):
        ep, each = drawn.randint(2, 12), drawn.randint(2, 6)
        many = ep * each - drawn.randint(0, ep * each // 2)
        loads = [drawn.paretovariate(1.2) for _ in range(many)]
        found = balanced(loads, ep * each - many, ep)
        assert found == pytest.approx(greedy(loads, ep * each - many, ep), rel=1e-9), SEED
        assert found >= 1 - 1e-9
    assert balanced([6.0, 1, 1, 0], 2, 3) == pytest.approx(3 * 3 / 8)  # 6 is halved twice: 2 + 1, 2 + 1, 2 + 0
    assert balanced([1.0] * 256, 32, 32) == pytest.approx(1)
    assert in_order([1.0, 2, 3, 4], 2) == pytest.approx(1.4)


def test_loads_of_a_file(tmp_path: Path) -> None:
    drawn = random.Random(SEED)
    loads = [[drawn.randint(0, 9) + 1 for _ in range(MANY)] for _ in range(LAYERS)]
    path = tmp_path / "loads"
    path.write_text("\n".join(" ".join(map(str, row)) for row in loads))
    words = [*WORDS, "--tp", "1", "--ep", "8", "--gpus", "8", "--redundant-experts", "16", "--expert-loads", str(path)]
    said = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["experts"]
    wanted = [greedy([float(x) for x in row], 16, 8) for row in loads]
    assert said["loads"] == "measured"
    assert said["busiest_over_mean"]["with"]["mean"] == pytest.approx(sum(wanted) / LAYERS)
    assert said["busiest_over_mean"]["with"]["most"] == pytest.approx(max(wanted))
    before = [max(sum(row[16 * i : 16 * i + 16]) for i in range(8)) * 8 / sum(row) for row in loads]
    assert said["busiest_over_mean"]["without"]["most"] == pytest.approx(max(before))
    assert "48 layers of the file" in CliRunner().invoke(cli, words).stdout
    for text in ("", "\n", "1 2 x", "1 -2", "1 nan", "0 0 0", "1e400 1"):
        path.write_text(text)
        with pytest.raises(InputError, match="expert-loads"):
            read_loads(path)


def test_the_command_carries_them_and_says_where_it_cannot() -> None:
    assert """--enable-eplb --eplb-config '{"num_redundant_experts": 16}'""" in ask(16, engine="vllm-0.19").command
    assert "--enable-eplb --ep-num-redundant-experts 16" in ask(16, engine="sglang").command
    other = ask(16, engine="tensorrt-llm")
    assert "16 replicas of experts" in other.document()["engine"]["command_leaves_out"]
    assert "eplb" not in ask(engine="vllm-0.19").command


def test_a_search_keeps_them_where_they_divide() -> None:
    plan = ask(16, gpus=8, users=64)
    found = {one.options for one in plan.layouts}
    spread = {words for words in found if "--ep" in words}
    assert spread
    assert all(words.endswith("--redundant-experts 16") for words in spread)
    assert all("redundant" not in words for words in found - spread)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"redundant": 5}, "redundant-experts: .*must be 0, 8, 16, 24, 32 or 40"),
        ({"redundant": -8}, "redundant-experts: must be a whole number from 0 to 896"),
        ({"redundant": 8, "ep": 1}, "redundant-experts: the experts are not spread over devices"),
        ({"expert_loads": ((1.0,) * 128,), "ep": 1}, "expert-loads: the experts are not spread"),
        ({"expert_loads": ((1.0,) * 127,)}, "expert-loads: numbers on line 1 .*must be 128"),
        ({"expert_loads": ((1.0,) * 128,) * 2}, "expert-loads: number of lines .*must be 1 or 48"),
    ],
)
def test_refusals(asked: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ask(**asked)  # type: ignore[arg-type]


def test_models_without_experts_and_pools_refuse_them() -> None:
    with pytest.raises(InputError, match="redundant-experts: the model has no experts"):
        serve("llama-3-8b", "h100-sxm", redundant_experts=8)
    with pytest.raises(InputError, match="redundant-experts: is not planned with two pools"):
        serve("qwen3-30b-a3b", "h100-sxm", prefill_gpus="2", decode_gpus="2", redundant_experts=8)
    with pytest.raises(InputError, match="redundant-experts"):
        place(find("qwen3-30b-a3b").spec(), gpus=8, tp=1, pp=1, ep=8, redundant=True)
