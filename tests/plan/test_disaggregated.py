"""Disaggregated prefill: two pools against closed forms, and what neither loses nor makes up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.plan.serve import tandem
from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.disaggregate import Pool, pool
from asbuilt.plan.serve.plan import ServePlan
from asbuilt.plan.serve.simulate import Request
from asbuilt.plan.serve.transfer import ends
from asbuilt.plan.serve.workload import Served, Workload
from asbuilt.spec import Pass

SEED = random.SystemRandom().randrange(2**31)
PLAIN = {"page": False, "network": 50e9}
# the middle of the assumed fractions of a link's rate
LINK = 0.55


def ask(
    model: str = "llama-3-8b",
    gpu: str = "h100-sxm",
    prefill: str = "8,tp=1",
    decode: str = "8,tp=1",
    **asked: Any,  # noqa: ANN401
) -> ServePlan:
    options: dict[str, Any] = {"conventions": PLAIN} | asked
    return serve(model, gpu, prefill_gpus=prefill, decode_gpus=decode, **options)


def served(plan: ServePlan) -> Served:
    assert plan.served is not None
    found = plan.served["middle"]
    assert found is not None
    assert found.pools is not None
    return found


def document(plan: ServePlan) -> dict[str, Any]:
    found = plan.document()["disaggregated"]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "degrees", "parts"),
    [
        ("llama-3-8b", "8,tp=4", 4),
        ("llama-3-8b", "8,tp=2,pp=4", 8),
        ("gemma-3-1b", "8,tp=1", 1),
        ("recurrentgemma-2b", "8,tp=1", 1),
        ("mamba2-2.7b", "8,tp=1", 1),
    ],
)
def test_the_whole_cache_of_the_prompt_crosses_once(model: str, degrees: str, parts: int) -> None:
    """Keys of all tokens and of windows, states, and what both have: as asbuilt's cache holds them."""
    prompt = random.Random(SEED).randint(100, 4000)
    plan = ask(model, prefill="8,tp=1", decode=degrees, prompt=prompt, context=4000)
    own = cost.cache(plan.capacity.spec, prompt, "bf16").at_seq
    found = document(plan)["transfer"]
    assert found["bytes"] == pytest.approx(own, rel=1e-4), SEED
    assert found["bytes_from_a_device"] == pytest.approx(own, rel=1e-4)
    assert found["bytes_to_a_device"] == pytest.approx(own / parts, rel=1e-4)
    assert found["seconds"] == pytest.approx(own / 50e9, rel=1e-4)
    assert found["expected"]["middle"] == pytest.approx(own / (LINK * 50e9), rel=1e-4)


def test_latents_are_sent_to_every_device_that_holds_them() -> None:
    plan = ask("deepseek-v3", "h200", "16,tp=8,ep=16", "16,tp=8,ep=16", prompt=1000, context=1000)
    one = cost.cache(plan.capacity.spec, 1000, "bf16").at_seq
    found = document(plan)["transfer"]
    assert found["bytes"] == pytest.approx(8 * one, rel=1e-9)
    assert found["bytes_from_a_device"] == found["bytes_to_a_device"] == pytest.approx(one, rel=1e-9)


def test_one_node_sends_over_its_link() -> None:
    plan = ask(prefill="4,tp=1", decode="4,tp=1", prompt=1000)
    assert plan.machine.link is not None
    assert document(plan)["transfer"]["bandwidth"] == plan.machine.link.bandwidth
    assert document(ask(prompt=1000))["transfer"]["bandwidth"] == 50e9


@pytest.mark.parametrize("transfer", ["after", "layerwise"])
def test_requests_that_do_not_meet_take_prefill_transfer_and_steps(transfer: str) -> None:
    """Every request alone: the first token after prefill and transfer, then one step of one sequence a token."""
    drawn = random.Random(SEED)
    prompt, answer = drawn.randint(500, 6000), drawn.randint(20, 200)
    workload = Workload(lengths=((prompt, answer),), rate=0.05, arrivals="even", requests=20)
    slow = PLAIN | {"network": 1e9}
    plan = ask(prefill="8,tp=4", decode="8,tp=8", workload=workload, kv_transfer=transfer, conventions=slow)
    at, found = plan.roofline.judged, served(plan)
    assert at.prefiller is not None
    computed = at.prefiller.prefill(prompt).seconds
    crossed = 32 * 2 * 8 * 128 * 2 * prompt / 4 / (LINK * 1e9)  # llama-3-8b's keys and values, a quarter a device
    first = computed + crossed
    if transfer == "layerwise":  # 32 layers: whichever is slower, and the other's one layer
        first = max(computed + crossed / 32, computed / 32 + crossed)
    steps = [at.decode(1, context).seconds for context in range(prompt + 1, prompt + answer)]
    assert found.per_token is not None
    assert found.pools is not None
    assert found.first_token.median == pytest.approx(first, rel=0.01), SEED
    assert plan.expected["middle"][0] == pytest.approx(first, rel=0.01), SEED
    assert found.pools.prefill.median == pytest.approx(computed, rel=0.01), SEED
    assert found.per_token.median == pytest.approx(sum(steps) / len(steps), rel=0.02), SEED
    assert found.request.median == pytest.approx(first + sum(steps), rel=0.02), SEED


def test_a_saturated_prefill_pool_serves_its_groups_over_the_seconds_of_a_prompt() -> None:
    drawn = random.Random(SEED)
    prompt, groups = drawn.randint(2100, 6000), drawn.choice((1, 2, 3))
    workload = Workload(lengths=((prompt, 2),), rate=1e6, requests=150 * groups)
    gpu = "memory=80GB,bandwidth=10000TB/s,bf16=100T"
    plan = ask("llama-3-8b", gpu, f"{groups},tp=1", "2,tp=1", workload=workload)
    flops = cost.flops(plan.capacity.spec, Pass(tokens=prompt, logits="last"))
    reached = plan.roofline.judged.reached
    seconds = float(flops.products) / (1e14 * reached.compute) + float(flops.scores_causal) / (1e14 * reached.scores)
    found = served(plan)
    assert found.requests_per_second == pytest.approx(groups / seconds, rel=0.02), SEED
    assert found.input_tokens_per_second == pytest.approx(groups * prompt / seconds, rel=0.02), SEED
    assert plan.balances is not None
    assert plan.balances["middle"].prefill == pytest.approx(groups / seconds, rel=0.02), SEED
    assert found.sustained is False
    assert found.pools is not None
    assert found.pools.prefill_sustained is False


def test_a_saturated_decode_pool_serves_its_slots_over_the_steps_of_an_answer() -> None:
    """Memory-bound: a step reads the weights once and every cache, however many prompts wait."""
    drawn = random.Random(SEED)
    slots, answer, prompt = drawn.randint(4, 40), drawn.randint(100, 500), drawn.randint(100, 1000)
    workload = Workload(lengths=((prompt, answer),), rate=1e5, requests=30 * slots)
    gpu = "memory=200GB,bandwidth=1TB/s,bf16=100000T,link=100000GB/s"
    plan = ask("llama-3-8b", gpu, "4,tp=1", "1,tp=1", workload=workload, max_num_seqs=slots)
    reached, own = plan.roofline.judged.reached, 32 * 2 * 8 * 128 * 2
    weights = (plan.weight_bytes - 128256 * 4096 * 2) / reached.bandwidth
    step = (weights + slots * own * (prompt + answer / 2) / reached.attention) / 1e12
    found = served(plan)
    assert found.requests_per_second == pytest.approx(slots / (step * (answer - 1)), rel=0.02), SEED
    assert found.output_tokens_per_second == pytest.approx(slots / step * answer / (answer - 1), rel=0.02), SEED
    assert found.per_token is not None
    assert plan.balances is not None
    one = plan.balances["middle"]
    assert (one.users, one.bound) == (slots, "decode")
    assert one.decode == pytest.approx(slots / (step * (answer - 1)), rel=0.02), SEED
    assert one.ratio == pytest.approx(one.decode / (one.prefill / 4), rel=1e-9)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (3, 2)])
def test_a_slow_network_carries_one_cache_at_a_time_on_either_side(prefill: int, decode: int) -> None:
    prompt = random.Random(SEED).randint(1000, 3000)
    workload = Workload(lengths=((prompt, 2),), rate=1e4, requests=300)
    slow = PLAIN | {"network": 1e8, "node": 1}
    plan = ask(prefill=f"{prefill},tp=1", decode=f"{decode},tp=1", workload=workload, conventions=slow)
    each = 32 * 2 * 8 * 128 * 2 * prompt / (LINK * 1e8)
    found = served(plan)
    assert found.requests_per_second == pytest.approx(min(prefill, decode) / each, rel=0.02), SEED
    assert found.pools is not None
    busiest = found.pools.sending if prefill <= decode else found.pools.receiving
    assert busiest == pytest.approx(1, abs=0.03)
    assert found.pools.prefill_cache_most <= 1
    assert found.sustained is not True  # of so many requests not every draw can tell
    assert not (found.pools.transfer_sustained and found.pools.prefill_sustained)


def test_layers_are_sent_while_the_next_are_computed() -> None:
    """A second account of it: piece by piece, each sent when it is computed and the last one has been."""
    drawn = random.Random(SEED)
    for _ in range(300):
        many = drawn.randint(1, 60)
        begun, free, computing, seconds = (drawn.uniform(0, 3) for _ in range(4))
        at = free
        for piece in range(1, many + 1):
            at = max(at, begun + computing * piece / many) + seconds / many
        assert ends(begun, begun + computing, free, seconds, many) == pytest.approx(at), SEED


@settings(max_examples=6, deadline=None)
@given(
    groups=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    lengths=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=6),
    rate=st.floats(0.5, 300),
    slots=st.integers(1, 30),
    network=st.sampled_from((1e8, 1e9, 5e10)),
    layerwise=st.booleans(),
    share=st.sampled_from((0.0, 0.5)),
    seed=st.integers(0, 1000),
)
def test_every_request_goes_through_both_pools_once(
    groups: tuple[int, int],
    lengths: list[tuple[int, int]],
    rate: float,
    slots: int,
    network: float,
    layerwise: bool,
    share: float,
    seed: int,
) -> None:
    workload = Workload(lengths=tuple(lengths), rate=rate, requests=40, seed=seed, prefix_share=share)
    here, there = groups
    plan = ask(
        "smollm2-135m",
        prefill=f"{here},tp=1",
        decode=f"{there},tp=1",
        context=workload.longest,
        max_num_seqs=slots,
        conventions=PLAIN | {"network": network, "node": 1},
        kv_transfer="layerwise" if layerwise else "after",
    )
    at = plan.roofline.judged
    assert at.prefiller is not None
    first, second = (
        tandem.prepared(one, workload, longest, 1)
        for one, longest in ((at.prefiller, max(a for a, _ in lengths)), (at, workload.longest))
    )
    assert first is not None
    assert second is not None
    both = tandem.Tandem(at, workload, first, second)
    served = [request for one in both.outcomes for request in one.requests]
    came = [_before(request) for request in served]
    assert len({one.number for one in came}) == len(served) == both.count * len(both.receivers)
    for request, before in zip(served, came, strict=True):
        assert before.origin is not None
        assert (request.prompt, request.output) == (before.origin.prompt, before.origin.output)
        moments = (before.arrived, before.begun, before.finished, before.sent, request.arrived, request.begun)
        assert sorted(moments) == list(moments)
        assert request.begun <= request.finished
        assert request.first == request.arrived
    for group in (*both.receivers, *both.senders):
        inside = len(group.waiting) + len(group.prefilling) + len(group.running)
        assert group.tally.arrived - group.tally.finished == group.inside == inside
        assert group.outcome.most_cache <= group.room.nbytes
    for group in both.senders:
        held = sum(request.kept for request in (*group.sending, *group.prefilling))
        assert group.kept == pytest.approx(held, abs=1)


def _before(request: Request) -> Request:
    assert request.origin is not None
    return request.origin


def test_a_cache_stays_where_it_was_computed_until_it_is_sent() -> None:
    """Room for two prompts, sent in turn: while one is sent one more is computed, so the link limits the rate."""
    prompt = random.Random(SEED).randint(1000, 2000)
    workload = Workload(lengths=((prompt, 2),), rate=1e3, requests=60)
    options = {"workload": workload, "conventions": PLAIN | {"network": 1e9, "node": 1, "utilisation": 1.0}}
    plan = ask("smollm2-135m", "memory=80GB,bandwidth=2TB/s,bf16=300T", "1,tp=1", "1,tp=1", **options)
    capacity = plan.capacity
    stage = capacity.device.stages[0]
    each = capacity.per_user(stage, prompt) + capacity.logits
    room = int(capacity.fixed(stage, prompt) + 2.5 * each)
    tight = ask("smollm2-135m", f"memory={room},bandwidth=2TB/s,bf16=300T", "1,tp=1", "1,tp=1", **options)
    assert tight.roofline.prefiller is not None
    link = 30 * 2 * 3 * 64 * 2 * prompt / (LINK * 1e9)
    alone = tight.roofline.judged.prefiller
    assert alone is not None
    computed = alone.prefill(prompt).seconds
    assert computed < link
    found = served(tight)
    assert found.requests_per_second == pytest.approx(1 / link, rel=0.02), SEED
    assert found.pools is not None
    assert 0.7 < found.pools.prefill_cache_most <= 1
    assert found.pools.prefill_sustained is not True


def test_the_price_is_that_of_both_pools() -> None:
    workload = Workload(lengths=((1000, 100),), rate=2.0, requests=200)
    plan = ask(prefill="2,tp=1", decode="6,tp=1", workload=workload, price=2.0)
    assert plan.costs is not None
    cost, found = plan.costs["middle"], served(plan)
    assert cost.hour == 16.0
    assert cost.million_input == pytest.approx(4.0 / 3600 / found.input_tokens_per_second * 1e6)
    assert cost.million_output == pytest.approx(12.0 / 3600 / found.output_tokens_per_second * 1e6)
    idle = ask(prefill="2,tp=1", decode="6,tp=1", price=2.0, prompt=1000, users=60)
    assert idle.costs is not None
    first = idle.roofline.judged.prefiller
    assert first is not None
    assert idle.costs["middle"].million_input == pytest.approx(4.0 / 3600 / 2000 * first.prefill(1000).seconds * 1e6)


def test_memory_is_that_of_each_pool() -> None:
    plan = ask("llama-3-70b", "h100-sxm", "4,tp=4,chunk=8192", "8,tp=8", context=4000)
    found = document(plan)
    for name, gpus, chunk in (("prefill", 4, 8192), ("decode", 8, 2048)):
        alone = serve("llama-3-70b", "h100-sxm", gpus=gpus, tp=gpus, pp=1, chunk=chunk, context=4000, conventions=PLAIN)
        assert found[name]["weight_bytes"] == alone.weight_bytes
        assert found[name]["sequences_that_fit"] == alone.users
        assert found[name]["chunk"] == chunk
    assert not ask("llama-3-70b", "h100-sxm", "1,tp=1", "8,tp=8", context=4000).fits  # the weights do not
    assert "Pools" in plan.markdown()
    asked = plan.document()["asked"]
    assert asked["prefill_gpus"] == {"gpus": 4, "tp": 4, "pp": None, "ep": None, "chunk": 8192}
    assert serve("llama-3-8b", "h100-sxm").document()["disaggregated"] is None


def test_targets_hold_with_what_crosses() -> None:
    plan = ask(prompt=2000, conventions=PLAIN | {"network": 1e8})
    first = plan.expected["middle"][0]
    late, early = (
        ask(prompt=2000, conventions=PLAIN | {"network": 1e8}, first_token_target=first * x) for x in (0.9, 1.1)
    )
    assert (late.fits, early.fits) == (False, True)
    assert all(one.option for one in late.suggestions)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("prefill-gpus", {"decode_gpus": None}),
        ("decode-gpus", {"prefill_gpus": None}),
        ("kv-transfer", {"prefill_gpus": None, "decode_gpus": None, "kv_transfer": "after"}),
        ("kv-transfer", {"kv_transfer": "never"}),
        ("prefill-gpus", {"prefill_gpus": "x"}),
        ("prefill-gpus", {"prefill_gpus": "8,tp"}),
        ("prefill-gpus", {"prefill_gpus": "8,dp=2"}),
        ("prefill-gpus", {"prefill_gpus": "8,tp=2,tp=4"}),
        ("prefill-gpus", {"prefill_gpus": "8,tp=3"}),
        ("prefill-gpus", {"prefill_gpus": "8,ep=2"}),
        ("decode-gpus", {"decode_gpus": "7,tp=2"}),
        ("decode-gpus", {"decode_gpus": "0"}),
        ("decode-gpus", {"decode_gpus": "2,chunk=0"}),
        ("gpus", {"gpus": 8}),
        ("tp", {"tp": 2}),
        ("kv-host", {"kv_host": 1e9}),
        ("ngl", {"gpu_layers": 3, "cpu": "epyc-9654"}),
        ("users", {"workload": Workload(lengths=((100, 10),), users=3)}),
        ("users", {"workload": Workload(lengths=((100, 10),), users=3, rate=1.0)}),
    ],
)
def test_refused(field: str, asked: dict[str, Any]) -> None:
    options: dict[str, Any] = {"prefill_gpus": "4,tp=2", "decode_gpus": "4,tp=4"} | asked
    with pytest.raises(InputError) as error:
        serve("llama-3-8b", "h100-sxm", **options)
    assert error.value.field == field


def test_refused_models_slices_and_searches() -> None:
    for model, gpu in (("bert-base-uncased", "h100-sxm"), ("t5-small", "h100-sxm"), ("llama-3-8b", "h100-sxm-3g.40gb")):
        with pytest.raises(InputError, match="prefill-gpus"):
            ask(model, gpu)
    with pytest.raises(InputError, match="search"):
        _ = ask().layouts


def test_a_pool_is_read_as_it_is_written() -> None:
    assert pool(" 16 , tp=8,ep = 16", "decode-gpus") == Pool(gpus=16, tp=8, ep=16)
    plan = ask(prefill="8,tp=2", decode="6")  # with tp the rest are copies; without, as with --gpus
    assert plan.roofline.prefiller is not None
    assert plan.roofline.prefiller.capacity.layout.copies == 4
    assert plan.layout.gpus == 6
