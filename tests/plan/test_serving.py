"""Serving plans: published answers by their conventions, caches, derivations, layouts, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from formulas import worked_out

from asbuilt import InputError, catalog, cost
from asbuilt.catalog import machines
from asbuilt.catalog.machine import Machine
from asbuilt.checkpoint.source import open_model
from asbuilt.kernels.memory import memory
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.devices import degrees, device, unplanned
from asbuilt.plan.precision import precision
from asbuilt.plan.serve import limits
from asbuilt.plan.serve.conventions import CHOICES, MEANING
from asbuilt.plan.serve.place import place
from asbuilt.plan.serve.report import compare
from asbuilt.spec import Block, Branch, Head, LatentAttention, Model, Pass, SharedEmbedding, TiedHead, TokenEmbedding

GB, GIB = 10**9, 2**30
LLAMA = catalog.find("llama-3-8b").spec()
KEYS = {
    "fits",
    "ladder",
    "weight_bytes",
    "kv_budget_bytes",
    "cache_tokens",
    "users",
    "largest_context",
    "largest_batch",
    "prefill",
    "decode",
    "suggestions",
    "conventions",
}


def test_three_published_answers_for_one_card() -> None:
    """Llama-3-8B at 8k on 80 GB: 53, 54 and 55 to 60 users, each by the convention it was computed by."""
    said = Conventions(memory="reported", overhead=3 * GIB)
    reported = serve(LLAMA, "h100-sxm", context=8192, conventions=said)
    assert reported.users == 53
    assert reported.kv_budget_bytes / GIB == pytest.approx(53.7, abs=0.05)
    usable = Conventions(memory="vendor", utilisation=1, reserve=3 * GB, overhead=3 * GB, count="nearest")
    vendor = serve(LLAMA, "a100-80gb", context=8192, conventions=usable)
    assert (vendor.users, vendor.cache_tokens) == (54, 442_043)
    low = Conventions(memory="vendor", utilisation=1, overhead=4 * GB)
    high = Conventions(memory="binary", utilisation=1, overhead=5 * GIB)
    assert [serve(LLAMA, "a100-80gb", context=8192, conventions=c).users for c in (low, high)] == [55, 60]


def test_memory_is_a_process_s_and_what_it_is_called_is_said() -> None:
    for gpu, gib, called in (
        ("h100-sxm", 79.19, "80 GB by the vendor, 79.65 GiB reported by the driver"),
        ("a100-80gb", 79.2, "80 GB by the vendor, 80.00 GiB reported by the driver"),
        ("rtx-3090", 23.58, "24 GB by the vendor, 24.00 GiB reported by the driver"),
        ("l40s", 44.4, "48 GB by the vendor, 44.99 GiB reported by the driver"),
    ):
        line = serve("gpt2", gpu).document()["ladder"][0]
        assert (line["line"], line["note"]) == ("device memory", called)
        assert line["bytes"] == pytest.approx(gib * GIB, rel=0.001)


@pytest.mark.parametrize(("gpu", "read", "lookup"), [("a100-80gb", 127, 136), ("h100-sxm", 209, 223)])
def test_published_speeds(gpu: str, read: int, lookup: int) -> None:
    """Of one sequence at its first token, with all weights read, and without the embedding that nobody reads."""
    for conventions, published in ((Conventions(embedding="read"), read), (Conventions(), lookup)):
        plan = serve(LLAMA, gpu, context=1, users=1, conventions=conventions)
        assert plan.decode is not None
        assert round(plan.decode.tokens_per_second) == published
        assert plan.decode.bound == "memory"


def test_published_speeds_if_compute_bound() -> None:
    """19,427 comes of 2N, and 61,644 of 2N with N rounded to 8.03e9: with all its digits it is 61,642."""
    found = {}
    for gpu, rate in (("a100-80gb", "312T"), ("h100-sxm", "990T")):
        for flops in ("2n", "2n-rounded", "declared"):
            plan = serve(
                LLAMA, machines.resolve(f"{gpu},bf16={rate}"), context=1, users=1, conventions=Conventions(flops=flops)
            )
            assert plan.decode is not None
            found[gpu, flops] = round(plan.decode.compute_tokens_per_second)
    assert found["a100-80gb", "2n"] == found["a100-80gb", "2n-rounded"] == 19_427
    assert (found["h100-sxm", "2n-rounded"], found["h100-sxm", "2n"]) == (61_644, 61_642)
    assert found["h100-sxm", "declared"] > found["h100-sxm", "2n"]  # the embedding multiplies nothing


CACHES = {"llama-3.1-8b": 16.000, "gemma-3-4b": 2.613, "gpt-oss-20b": 3.003, "deepseek-v3": 8.578}


@pytest.mark.parametrize("name", CACHES)
def test_cache_of_131072_tokens(name: str) -> None:
    if name not in catalog.names():
        pytest.skip(f"{name} is not in the catalogue yet")
    caches = serve(name, "h200", context=131072).caches
    assert caches is not None
    assert round(caches.minimum / GIB, 3) == CACHES[name]
    assert caches.minimum == caches.object <= caches.paged


def test_latent_caches_are_whole_on_every_device() -> None:
    """DeepSeek-V3's attention: 61 layers of 512 + 64 numbers, 8.578 GiB for 131,072 tokens however many devices."""
    latent = LatentAttention(d_model=7168, n_heads=128, q_rank=1536, kv_rank=512, d_nope=128, d_rope=64, d_value=128)
    spec = Model(
        embedding=TokenEmbedding(n_vocab=129280, d_model=7168),
        blocks=(Block(branches=(Branch(name="attention", body=latent),)),) * 61,
        head=Head(d_model=7168, n_vocab=129280),
        max_positions=163840,
    )
    for tp in (1, 8):
        plan = serve(spec, "h200", context=131072, tp=tp)
        cached = {line.name: line.value for line in plan.counted}["cache per user"]
        assert round(cached / GIB, 3) == 8.578
        assert plan.caches is not None
        assert plan.caches.minimum == cached


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_experts_touched_rise_with_the_batch(name: str) -> None:
    if name not in catalog.names():
        pytest.skip(f"{name} is not in the catalogue yet")
    spec = catalog.find(name).spec()
    moved = []
    for batch in (1, 8, 64, 512):
        plan = serve(spec, "h200", context=4096, users=batch)
        assert plan.decode is not None
        moved.append(sum(c.weights for c in plan.decode.run.components))
        plain = cost.moved(spec, Pass(tokens=1, batch=batch, past=4095), "bf16", "bf16")
        assert moved[-1] == sum(plain.weights.values())
    assert moved == sorted(moved)
    assert moved[0] < moved[1] < moved[2]
    assert moved[3] <= cost.weight_bytes(spec, "bf16")


def test_mixtral_uses_twelve_of_forty_seven_billion() -> None:
    spec = catalog.find("mixtral-8x7b").spec()
    assert cost.active_parameters(spec) == 12_879_925_248
    plan = serve(spec, "h200", context=1, users=1, conventions=Conventions(flops="2n"))
    assert plan.decode is not None
    flops = sum(c.flops for c in plan.decode.run.components)
    assert flops == pytest.approx(2 * 12_879_925_248)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "mixtral-8x7b", "gpt2"])
@pytest.mark.parametrize("gpu", ["h100-sxm", "l4", "cpu-2core"])
def test_every_line_gives_its_value(name: str, gpu: str) -> None:
    plan = serve(name, gpu, context=1000, prompt=700, chunk=256)
    assert len(plan.lines) > 15
    for line in plan.lines:
        assert worked_out(line) == pytest.approx(line.value, rel=1e-9), line
        assert line.symbols in plan.explain()
        assert line.figures in plan.explain()


def test_figures_are_those_of_the_cost_module() -> None:
    plan = serve(LLAMA, "h100-sxm", context=5000, users=7)
    run = Pass(tokens=1, batch=7, past=4999)
    assert plan.decode is not None
    components = plan.decode.run.components
    assert plan.weight_bytes == sum(c.stored for c in components) == cost.weight_bytes(LLAMA, "bf16")
    assert sum(c.moved for c in components) == cost.moved(LLAMA, run, "bf16", "bf16").total
    assert sum(c.flops for c in components) == cost.flops(LLAMA, run).forward_causal
    activations = {line.name: line.value for line in plan.ladder}["activations"]
    assert activations == memory(LLAMA).peak_bytes(Pass(tokens=2048, logits="last"))


def test_the_document() -> None:
    document = json.loads(json.dumps(serve(LLAMA, "h100-sxm").document()))
    assert {*document} >= KEYS
    assert document["ladder"][0]["line"] == "device memory"
    taken = sum(line["bytes"] for line in document["ladder"][1:-1])
    assert document["ladder"][0]["bytes"] - taken == document["ladder"][-1]["bytes"] == document["kv_budget_bytes"]
    assert {"seconds", "bound"} <= {*document["prefill"]}
    wanted = {"seconds_per_step", "tokens_per_second", "tokens_per_second_per_user", "bound"}
    assert wanted <= {*document["decode"]}


def test_times_are_roofs() -> None:
    """One prompt's FLOPs over the rate, one step's bytes over the bandwidth; half the efficiency is twice the time."""
    machine = Machine(name="slow", memory_gb=80, bandwidth=1e12, rates={"bf16": 1e14})
    plan = serve(LLAMA, machine, context=4096, prompt=2048, users=1)
    assert plan.decode is not None
    assert plan.decode.run.memory_seconds == cost.moved(LLAMA, Pass(tokens=1, past=4095), "bf16", "bf16").total / 1e12
    flops = cost.flops(LLAMA, Pass(tokens=2048, logits="last")).forward_causal
    assert plan.prefill.run.compute_seconds == pytest.approx(flops / 1e14)
    half = serve(LLAMA, machine, context=4096, prompt=2048, users=1, bandwidth_efficiency=0.5, compute_efficiency=0.5)
    assert half.decode is not None
    assert half.decode.seconds_per_step == pytest.approx(2 * plan.decode.seconds_per_step)
    assert half.prefill.seconds == pytest.approx(2 * plan.prefill.seconds)


def test_a_chunked_prompt_costs_as_many_flops() -> None:
    """And reads its weights once for each chunk."""
    machine = Machine(name="slow", memory_gb=80, bandwidth=1e12, rates={"bf16": 1e14})
    whole, chunked = (serve(LLAMA, machine, context=4096, prompt=4096, chunk=chunk).prefill for chunk in (4096, 512))
    assert chunked.run.compute_seconds == pytest.approx(whole.run.compute_seconds, rel=1e-3)
    ffn = [next(c for c in p.run.components if c.kind == "ffn").weights for p in (whole, chunked)]
    assert ffn[1] == 8 * ffn[0]


def test_fp8_multiplies_at_its_own_rate_where_there_is_one() -> None:
    fast, slow = (serve(LLAMA, gpu, dtype="fp8", prompt=2048) for gpu in ("h100-sxm", "a100-80gb"))
    assert fast.roofline.rates[0][1] == "fp8"
    assert slow.roofline.rates[0][1] == "bf16"
    assert not fast.warnings
    assert any("has no fp8 rate" in warning for warning in slow.warnings)


def test_group_scales() -> None:
    """4 bits, and for each group of 128 a scale of 16 bits and a zero point of 4; the rest in bf16."""
    matrices = sum(n for kind, n in cost.parameters(LLAMA).items() if kind in ("attention", "ffn"))
    others = cost.total_parameters(LLAMA) - matrices
    for name, each in (("int4:128", 0.5 + 2.5 / 128), ("int8:64", 1 + 2 / 64), ("fp8:128", 1 + 4 / 128**2)):
        assert serve(LLAMA, "h100-sxm", dtype=name).weight_bytes == pytest.approx(matrices * each + others * 2, abs=8)
    for name in ("int4", "q4_k", "fp8", "fp32"):
        assert serve(LLAMA, "h100-sxm", dtype=name).weight_bytes == pytest.approx(cost.weight_bytes(LLAMA, name), abs=8)


def test_windows() -> None:
    spec = catalog.find("gemma-3-4b").spec()
    held, full = (serve(spec, "l4", context=32768, conventions=Conventions(windows=w)) for w in ("held", "full"))
    assert held.users is not None
    assert full.users is not None
    assert held.users > 4 * full.users
    assert any(a.switch == "windows" and a.users == full.users for a in held.alternatives)


def test_pages_round_up() -> None:
    whole, paged = (
        serve(LLAMA, "h100-sxm", context=1001, conventions=Conventions(page=page, block_size=256))
        for page in (False, True)
    )
    assert whole.users is not None
    assert paged.users is not None
    assert whole.caches is not None
    assert whole.caches.paged / whole.caches.minimum == 1024 / 1001
    assert paged.users < whole.users


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_tensor_parallel(tp: int) -> None:
    """Weights are divided, norms aside; so is the cache, until there are more devices than key/value heads."""
    plan = serve(LLAMA, "h100-sxm", tp=tp)
    cached = {line.name: line.value for line in plan.counted}["cache per user"]
    assert cached == GIB / min(tp, 8)
    assert plan.weight_bytes == cost.weight_bytes(LLAMA.shard(tp), "bf16")
    assert plan.layout.gpus == tp


def test_pipeline_stages_hold_the_whole_between_them() -> None:
    for name in ("llama-3-8b", "gpt2", "gemma-3-4b"):
        spec = catalog.find(name).spec()
        for pp in (1, 2, 3, 5):
            found = device(spec, place(spec, gpus=pp, tp=1, pp=pp, ep=None), precision("bf16"))
            held = sum(stage.folds.total_bytes * stage.stage.count for stage in found.stages)
            table = cost.weight_bytes(spec.embedding, "bf16")
            assert spec.head is not None
            tied = pp > 1 and "weight" not in spec.head.holds()
            assert held == cost.weight_bytes(spec, "bf16") + table * tied  # the last stage multiplies a copy of it
            assert sum(stage.stage.count for stage in found.stages) == pp
            cached = sum(stage.folds.cache_numbers(100).nbytes(2) * stage.stage.count for stage in found.stages)
            assert cached == cost.cache(spec, 100, "bf16").at_seq


def test_what_is_not_said_is_chosen() -> None:
    def chosen(name: str, gpus: int) -> tuple[int, int, int]:
        made = place(catalog.find(name).spec(), gpus=gpus, tp=None, pp=None, ep=None)
        return made.tp, made.pp, made.replicas

    assert chosen("llama-3-70b", 8) == (8, 1, 1)
    assert chosen("llama-3-70b", 16) == (8, 2, 1)
    assert chosen("falcon-7b", 4) == (1, 4, 1)  # 71 heads
    assert chosen("gpt2", 8) == (4, 2, 1)  # 12 heads; the vocabulary of 50,257 is padded
    assert chosen("gpt2", 17) == (1, 1, 17)  # fewer layers than devices
    assert chosen("gpt2", 48) == (4, 12, 1)  # a layer for each stage


def test_a_catalogue_model_is_planned_as_it_is_published() -> None:
    """DeepSeek-V3 in fp8 on eight H200; what is published in bf16, and what is asked for, as that."""
    published = serve("deepseek-v3", "h200", gpus=8)
    assert (published.precision.name, published.fits) == ("quantised (fp8)", True)
    assert not serve("deepseek-v3", "h200", gpus=8, dtype="bf16").fits
    assert serve("llama-3-8b", "h200").precision.name == serve(LLAMA, "h200").precision.name == "bf16"


def test_links_take_time() -> None:
    slow = replace(machines.find("h100-sxm"), link=None)
    linked, silent = (serve("llama-3-70b", gpu, tp=8) for gpu in ("h100-sxm", slow))
    assert linked.decode is not None
    assert silent.decode is not None
    # a ring sum after attention and after the feed-forward of every layer, at 450 GB/s
    assert linked.decode.run.link_seconds == pytest.approx(80 * 2 * linked.decode.batch * 8192 * 2 * 2 * 7 / 8 / 450e9)
    # and without a link of its own over PCIe 4 x16: sixteen lanes of 16 GT/s, of which 128 in 130 bits are data
    assert silent.decode.run.link_seconds == pytest.approx(linked.decode.run.link_seconds * 450 / 32)
    assert pytest.approx(32, rel=0.02) == 16 * 16 / 8 * 128 / 130
    assert any("no link is known for h100-sxm: 32 GB/s" in warning for warning in silent.warnings)
    assert not linked.warnings


def test_several_nodes_are_joined_by_a_network() -> None:
    """16 devices in two nodes of 8, or one of 16: at 400 Gb/s a device, or at NVLink 4's 450 GB/s."""
    near = Conventions(node=16)
    apart, together = (serve(LLAMA, "h100-sxm", tp=16, users=8, conventions=c) for c in (None, near))
    slower = serve(LLAMA, "h100-sxm", tp=16, users=8, conventions=Conventions(network=25e9))
    sums = 32 * 2 * 8 * 4096 * 2 * 2 * 15 / 16
    for plan, speed, told in ((apart, 50e9, True), (together, 450e9, False), (slower, 25e9, True)):
        assert plan.decode is not None
        assert plan.decode.run.link_seconds == pytest.approx(sums / speed, rel=1e-12)
        assert any("several nodes of 8" in warning for warning in plan.warnings) == told
    assert apart.document()["conventions"]["node"] == 8
    assert apart.document()["conventions"]["network"] == 50e9
    assert "8 devices per node; 50 GB/s per device between nodes" in apart.markdown()
    alone = serve(LLAMA, "h100-sxm,link=1GB/s", tp=16, users=8)  # a network is no faster than the link before it
    assert alone.decode is not None
    assert alone.decode.run.link_seconds == pytest.approx(sums / 1e9, rel=1e-12)


def test_tensor_parallelism_is_chosen_within_a_node() -> None:
    spec = catalog.find("llama-3-70b").spec()
    for node, tp, pp in ((8, 8, 2), (4, 4, 4), (16, 16, 1)):
        made = place(spec, gpus=16, tp=None, pp=None, ep=None, node=node)
        assert (made.tp, made.pp) == (tp, pp)
    assert serve(spec, "h100-sxm", gpus=16, conventions=Conventions(node=4)).layout.tp == 4
    gpt2 = catalog.find("gpt2").spec()  # 12 heads: groups of six would lie across nodes of 8
    assert place(gpt2, gpus=24, tp=None, pp=None, ep=None).tp == 4
    assert place(gpt2, gpus=6, tp=None, pp=None, ep=None).tp == 6


def test_activations_are_those_of_the_last_chunk_with_its_past() -> None:
    """gpt-oss-20b's unfused kernel: 64 heads x 2,048 x 131,072 scores, as they are (2 bytes) and twice in float32."""
    library = Conventions(kernel="library")
    held = {}
    for kernel, conventions in (("library", library), ("engine", None)):
        for context in (2048, 131072):
            plan = serve("gpt-oss-20b", "h200", context=context, conventions=conventions)
            line = next(line for line in plan.ladder if line.name == "activations")
            held[kernel, context] = line.value
            assert {"engine": "a serving engine's", "library": "asbuilt's own"}[kernel] in line.source
            assert plan.document()["conventions"]["kernel"] == kernel
            assert ("after 129,024" in line.note) == ("after" in line.note) == (context == 131072)
    scores = 64 * 2048 * 131072 * (2 + 2 * 4)
    assert held["library", 131072] == pytest.approx(scores, rel=0.001)  # 160 GiB
    assert held["library", 2048] == pytest.approx(64 * 2048 * 2048 * 10, rel=0.05)
    assert held["engine", 131072] == held["engine", 2048] < 0.4 * GIB
    at_length = serve("gpt-oss-20b", "h200", context=131072)
    assert any((a.switch, a.value, a.users) == ("kernel", "library", 0) for a in at_length.alternatives)


def test_latents_of_the_past_are_expanded_for_each_chunk() -> None:
    """DeepSeek-V3: keys of 192 and values of 128 numbers, of 128 heads, for all 131,072 tokens, by either kernel."""
    held = [
        next(
            line.value
            for line in serve("deepseek-v3", "h200", context=n, dtype="bf16").ladder
            if line.name == "activations"
        )
        for n in (2048, 131072)
    ]
    # keys, values, and values filled up to the width of the keys, since one kernel knows one width: 192 + 128 + 192
    assert held[1] - 131072 * 128 * (192 + 128 + 192) * 2 == pytest.approx(0, abs=0.3 * GIB)
    # of 8 x 2,048 rows places, order, weights, and the two workspaces of fused experts, each as wide as the stream,
    # which is wider than gate and up, 2 x 2,048; the stream four times (itself, the block's input, that normed, the sum
    # of what comes out), positions, cos and sin
    rows, stream = 8 * 2048, 2048 * 7168 * 2
    assert held[0] == rows * (16 + 8 + 2 + 2 * 7168 * 2) + 4 * stream + 2048 * (8 + 2 * 64 * 2)


@pytest.mark.parametrize("name", ["bert-base-uncased", "vit-base-patch16-224"])
def test_an_encoder_s_flops_per_token_are_a_token_s(name: str) -> None:
    """12 layers of 768 x 768 x (4 + 2 x 4), and scores and mixing with all tokens; nothing is read piece by piece."""
    spec = catalog.find(name).spec()
    for chunk in (16, 2048):
        plan = serve(spec, "h100-sxm", chunk=chunk)
        tokens = plan.prefill.prompt
        assert tokens == plan.context == spec.max_positions
        per_token = {c["kind"]: c["flops_per_token"] for c in plan.document()["components"]}
        assert per_token["attention"] == 12 * (4 * 2 * 768 * 768 + 2 * 2 * tokens * 768)
        assert per_token["ffn"] == 12 * 2 * 2 * 768 * 3072
        rows = {row[0]: row for table in plan.tables() if "FLOPs per token" in table.columns for row in table.rows}
        assert rows["ffn"][4] == 12 * 2 * 2 * 768 * 3072


def test_flops_per_token_are_a_token_s_in_any_layout() -> None:
    """4 copies, or 4 stages of 8 layers: 64 users are 16 to a run, and each is charged what one token multiplies."""
    for pp in (None, 1, 4):
        plan = serve(LLAMA, "h100-sxm", users=64, context=1024, tp=1, gpus=4 if pp else 1, pp=pp)
        per_token = {c["kind"]: c["flops_per_token"] for c in plan.document()["components"]}
        assert per_token["ffn"] == 32 // (pp or 1) * 3 * 2 * 4096 * 14336


def test_times_are_called_the_least_there_can_be() -> None:
    plan = serve(LLAMA, "h100-sxm")
    assert "theoretical minimum" in plan.document()["conventions"]["times"]
    text = plan.markdown()
    for said in (
        "Theoretical minimum of the time",
        "minimum time per token",
        "minimum time to first token",
        "maximum tokens/s",
        "theoretical minimum: bytes at the full bandwidth",
    ):
        assert said in text
    assert "theoretical minima" in compare([plan, plan]).title
    notes = {line.name: line.note for line in plan.lines}
    assert notes["prefill of 2,048"] == notes["decode step of 55"] == "theoretical minimum"
    assert notes["tokens/s"] == "theoretical maximum"


def test_experts_over_devices() -> None:
    spec = catalog.find("qwen3-30b-a3b").spec()
    one, many = serve(spec, "h100-sxm"), serve(spec, "h100-sxm", tp=1, ep=8)
    assert many.layout.groups == 8
    held = {c.kind: c.stored for c in many.prefill.run.components}
    whole = {c.kind: c.stored for c in one.prefill.run.components}
    assert held["ffn"] == whole["ffn"] / 8
    assert held["attention"] == whole["attention"]
    assert one.users is not None
    assert many.users is not None
    assert many.users > 8 * one.users


def test_suggestions_are_true_and_best_first() -> None:
    """Each is made, and does what it says; those that fit come first."""
    plan = serve("llama-3-70b", "h100-sxm", users=4)
    assert not plan.fits
    fits = [s.fits for s in plan.suggestions]
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    for said in plan.suggestions:
        words = said.option.split()
        named = {a.removeprefix("--").replace("-", "_"): b for a, b in zip(words[::2], words[1::2], strict=True)}
        numbers = {k: int(v) for k, v in named.items() if k in ("gpus", "context", "users")}
        texts = {k: v for k, v in named.items() if k in ("dtype", "kv_dtype")}
        made = serve("llama-3-70b", named.get("gpu", "h100-sxm"), **({"users": 4} | texts | numbers))  # type: ignore[arg-type]
        assert (made.fits, made.users) == (said.fits, said.users), said
    assert serve("llama-3-8b", "h100-sxm").suggestions == ()


def test_fewer_or_shorter_are_suggested_where_there_is_room_for_some() -> None:
    options = [s.option for s in serve("llama-3-8b", "h100-sxm", users=100).suggestions]
    assert "--users 55" in options
    assert any(option.startswith("--context ") for option in options)


def test_smallest_card_and_count() -> None:
    plan = serve("llama-3-70b", "h100-sxm")
    assert plan.smallest_count == 2
    assert plan.smallest_card is not None
    assert serve("llama-3-70b", plan.smallest_card).fits
    assert serve("llama-3-70b", "h100-sxm", gpus=2).fits


def test_a_card_without_a_rate_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TPU v4 has none in fp32, so a plan of it would be refused."""
    monkeypatch.setattr(limits, "_by_memory", lambda _: [machines.find(name) for name in ("tpu-v4", "h100-sxm")])
    assert serve("gpt2", "h100-sxm", dtype="fp32", any_vendor=True).smallest_card == "h100-sxm"
    assert serve("gpt2", "h100-sxm", any_vendor=True).smallest_card == "tpu-v4"
    assert serve("gpt2", "h100-sxm").smallest_card == "h100-sxm"  # of the same vendor


def test_of_cards_with_as_much_memory_the_fastest_is_named() -> None:
    """Gemma-2-27B takes 54.5 GB: by the vendors' numbers 64 GB are too few; of the 80 GB cards one has 3.35 TB/s."""
    plan = serve("gemma-2-27b", "h200", dtype="bf16", conventions=Conventions(memory="vendor"))
    assert plan.smallest_card == "h100-sxm"


def test_no_wider_weights_are_suggested() -> None:
    """Of what is in 8 bits 4 remain, and of what is in 4 none; a cache in 8 bits stays as it is."""
    for dtype, options in (
        ("bf16", {"--dtype fp8:128", "--dtype int4:128"}),
        ("fp8", {"--dtype int4:128"}),
        ("int4", set()),
    ):
        found = [s.option for s in serve("llama-3-70b", "l4", dtype=dtype, kv_dtype="fp8").suggestions]
        assert {option for option in found if "dtype" in option} == options


def test_targets() -> None:
    met = serve(LLAMA, "h100-sxm", latency_target=0.010)
    assert met.users is not None
    assert met.decode is not None
    assert met.users == met.largest_batch == met.decode.batch
    assert met.users_that_fit == serve(LLAMA, "h100-sxm").users
    assert 1 < met.users < (met.users_that_fit or 0)
    for batch, ok in ((met.users, True), (met.users + 1, False)):
        plan = serve(LLAMA, "h100-sxm", users=batch, latency_target=0.010, first_token_target=1)
        assert (plan.fits, plan.targets) == (ok, {"time per token": ok, "time to first token": True})
    never = serve(LLAMA, "h100-sxm", users=1, latency_target=1e-6)
    assert (never.fits, never.users, never.largest_context, never.smallest_card, never.smallest_count) == (
        False,
        0,
        0,
        None,
        None,
    )


def test_answers_backwards_honour_the_targets() -> None:
    """There is room for four, but 15 GB of weights at 2 TB/s take 7.4 ms a token."""
    plan = serve(LLAMA, "a100-80gb", users=4, context=2048, latency_target=0.006)
    assert plan.users_that_fit is not None
    assert plan.users_that_fit > 4
    assert (plan.fits, plan.users) == (False, 0)
    assert plan.smallest_count == 2
    assert [serve(LLAMA, "a100-80gb", gpus=n, users=4, context=2048, latency_target=0.006).fits for n in (1, 2)] == [
        False,
        True,
    ]
    assert plan.smallest_card is not None
    card = machines.find(plan.smallest_card)
    assert serve(LLAMA, card, users=4, context=2048, latency_target=0.006).fits
    smaller = [
        machine
        for machine in machines.MACHINES.values()
        if machine.kind == "accelerator" and machine.memory_bytes() < card.memory_bytes()
    ]
    assert not any(serve(LLAMA, machine, users=4, context=2048, latency_target=0.006).fits for machine in smaller)
    assert any(serve(LLAMA, machine, users=4, context=2048).fits for machine in smaller)  # by memory they would do
    assert any(s.fits and s.option == "--gpus 2" for s in plan.suggestions)
    for said in plan.suggestions:
        assert said.fits == (said.users >= 4)
        assert "within the targets" in said.effect


LEAST = Conventions(targets="minimum")


def least(gpu: str, **asked: Any) -> ServePlan:  # noqa: ANN401
    """With targets held against theoretical minima."""
    return serve(LLAMA, gpu, conventions=LEAST, **asked)


def test_the_largest_context_honours_the_targets() -> None:
    """At 16 users a step is 15 GB of weights and 2.1 GB of cache per 1,024 tokens, at 3.35 TB/s."""
    most = least("h100-sxm", context=1024, users=16, latency_target=0.006).largest_context
    assert most is not None
    assert most == pytest.approx((0.006 * 3.35e12 - 15.01e9) / (16 * 131072), rel=0.01)
    fits = [least("h100-sxm", context=n, users=16, latency_target=0.006).fits for n in (most, most + 1)]
    assert fits == [True, False]
    assert serve(LLAMA, "h100-sxm", context=8192, users=16).fits
    shorter = [
        s
        for s in least("h100-sxm", context=8192, users=16, latency_target=0.006).suggestions
        if "--context" in s.option
    ]
    assert [(s.option, s.fits) for s in shorter] == [(f"--context {most}", True)]
    given = least("h100-sxm", context=8192, users=16, latency_target=0.006, prompt=most + 1).suggestions
    assert not any("--context" in s.option for s in given)  # which would leave no room for that prompt


def test_the_first_token_s_target_is_honoured() -> None:
    """A prompt of 2,048 tokens takes about 2 x 7.5e9 FLOPs a token: 31 ms on an H100, 98 on an A100."""
    for gpu, ok in (("h100-sxm", True), ("a100-80gb", False)):
        plan = least(gpu, first_token_target=0.05)
        assert plan.fits == ok
        assert (plan.users == plan.users_that_fit) == ok
        assert (plan.users == 0) != ok
        assert plan.targets == {"time to first token": ok}
    slow = least("a100-80gb", first_token_target=0.05)
    assert slow.smallest_count == 4  # of two each takes 49 ms, and their 64 sums of 2,048 x 4,096 numbers 3.6 more
    assert slow.largest_context is not None
    short = least("a100-80gb", context=slow.largest_context, first_token_target=0.05)
    assert short.fits
    assert short.prefill.prompt == slow.largest_context < 2048
    assert not least("a100-80gb", context=slow.largest_context + 1, first_token_target=0.05).fits


def test_a_context_beyond_the_model_s_is_told_and_planned() -> None:
    plan = serve(LLAMA, "h100-sxm", context=20000)
    assert any("exceed the model's context of 8,192" in warning for warning in plan.warnings)
    assert plan.users == 22
    assert plan.largest_context == 8192


def test_what_cannot_be_planned_is_refused_by_name_and_the_rest_is_exact() -> None:
    """Attention that sees all tokens at once remembers nothing, so nothing is decoded."""
    blocks = tuple(
        replace(
            block,
            branches=tuple(
                replace(b, body=replace(b.body, causal=False)) if hasattr(b.body, "causal") else b
                for b in block.branches
            ),
        )
        for block in LLAMA.blocks
    )
    spec = replace(LLAMA, blocks=blocks)
    assert [(part, figure) for _, part, figure, _ in unplanned(spec)] == [("Attention", "decode")]
    plan = serve(spec, "h100-sxm")
    assert not plan.fits
    assert plan.weight_bytes == cost.weight_bytes(spec, "bf16")
    assert plan.prefill.seconds > 0
    assert (plan.users, plan.decode, plan.largest_context, plan.caches) == (None,) * 4
    document = plan.document()
    assert document["refused"][0]["part"] == "Attention"
    assert "it has no cache" in plan.markdown()


def test_published_models_are_planned() -> None:
    """All that decode are; what is inside an attention part is that part's affair."""
    for name in catalog.names():
        spec = catalog.find(name).spec()
        found = {figure for _, _, figure, _ in unplanned(spec)}
        assert found == (set() if spec.decodes else {"decode"}), name


def test_layers_that_read_others_keys_are_planned() -> None:
    """They cache nothing themselves: Gemma 4's last layers, and every second one here."""
    (block,) = {*LLAMA.blocks}
    branch = block.branches[0]
    own, other = (
        replace(block, branches=(replace(branch, body=replace(branch.body, **how)), block.branches[1]))  # pyright: ignore
        for how in ({"kv_name": "early"}, {"kv_from": "early"})
    )
    spec = replace(LLAMA, blocks=(own, other, *(block,) * 14))
    assert unplanned(spec) == ()
    plan = serve(spec, "h100-sxm")
    assert plan.users is not None
    plain = cost.cache(replace(LLAMA, blocks=(block,) * 15), 1, "bf16").per_token
    assert cost.cache(spec, 1, "bf16").per_token == plain


SHARED = Path(__file__).parents[3] / "shared"


@pytest.mark.skipif(not SHARED.exists(), reason="no published models here")
def test_published_configs_are_planned() -> None:
    """Of every config that is read: whatever generates is planned."""
    found = 0
    for path in sorted(SHARED.glob("*/*/config.json")):
        try:
            spec = open_model(path).spec
        except InputError:
            continue
        found += spec.generates
        assert not spec.generates or not unplanned(spec), path
    assert found > 50


WRONG = [
    ({"tp": 3}, "tp", "1, 2, 4, 8, 16 or 32"),
    ({"tp": 0}, "tp", ""),
    ({"gpus": -1}, "gpus", ""),
    ({"gpus": 3, "tp": 2}, "gpus", "a multiple of 2"),
    ({"pp": 33}, "pp", "1 to 32"),
    ({"ep": 2}, "ep", "1"),
    ({"context": 0}, "context", ""),
    ({"context": 10**10}, "context", ""),
    ({"context": -5}, "context", ""),
    ({"prompt": 9000}, "prompt", "8,192"),
    ({"users": 0}, "users", ""),
    ({"chunk": 0}, "chunk", ""),
    ({"dtype": "bf17"}, "dtype", "bf16"),
    ({"dtype": "int4:1"}, "dtype", ""),
    ({"kv_dtype": "q4_k"}, "kv-dtype", ""),
    ({"latency_target": 0.0}, "latency_target", ""),
    ({"latency_target": math.nan}, "latency_target", ""),
    ({"bandwidth_efficiency": 1.5}, "bandwidth_efficiency", ""),
    ({"compute_efficiency": 0.0}, "compute_efficiency", ""),
]


@pytest.mark.parametrize(("said", "field", "allowed"), WRONG, ids=str)
def test_wrong_questions(said: dict[str, object], field: str, allowed: str) -> None:
    with pytest.raises(InputError) as refused:
        serve(LLAMA, "h100-sxm", **said)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert allowed in refused.value.allowed


WRONG_CONVENTIONS = [
    {"utilisation": 0.0},
    {"utilisation": 1.1},
    {"block_size": 0},
    {"memory": "x"},
    {"kernel": "x"},
    {"node": 0},
    {"network": 0.0},
    {"network": math.inf},
]


@pytest.mark.parametrize("said", WRONG_CONVENTIONS, ids=str)
def test_wrong_conventions(said: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Conventions(**said)  # type: ignore[arg-type]


def test_every_choice_is_explained() -> None:
    assert {switch: {*said} for switch, said in MEANING.items()} == {name: {*those} for name, those in CHOICES.items()}
    full = serve("gemma-3-4b", "l4", conventions=Conventions(windows="full"))
    assert [a.meaning for a in full.alternatives if a.switch == "windows"] == [
        "sliding-window layers cache only their window",
        "sliding-window layers cache their window and a chunk, which engines with a hybrid cache reserve",
    ]


def test_names_that_are_none() -> None:
    with pytest.raises(InputError, match="h100-sxm"):
        serve(LLAMA, "h100")
    with pytest.raises(InputError, match="llama-3-8b"):
        serve("llama-3-9b", "h100-sxm")


def test_wrong_experts() -> None:
    with pytest.raises(InputError, match=r"1, 2, 4 or 8"):
        serve("mixtral-8x7b", "h100-sxm", ep=3)
    with pytest.raises(InputError, match="a divisor or a multiple of 2"):
        serve("deepseek-v2", "h200", tp=2, ep=5)  # 160 experts
    assert serve("deepseek-v2", "h200", tp=2, ep=10).layout.groups == 5
    assert serve("bloom-176b", "h200", tp=7).layout.tp == 7
    with pytest.raises(InputError, match="no experts"):
        serve("bloom-176b", "h200", tp=7, ep=2)


def test_degrees() -> None:
    assert degrees(LLAMA, 1024) == [1, 2, 4, 8, 16, 32]
    assert degrees(catalog.find("gpt2").spec(), 1024) == [1, 2, 3, 4, 6, 12]  # of 12 heads, whatever the vocabulary


def test_a_vocabulary_is_padded_as_engines_do() -> None:
    """GPT-2 on 4 devices: 50,304 rows of which each holds 12,576, and a quarter of what is divided in every layer."""
    plan = serve("gpt2", "h100-sxm", tp=4, context=1024)
    divided = 12 * (768 * 3 * 768 + 3 * 768 + 768 * 768 + 768 * 3072 + 3072 + 3072 * 768)  # qkv, o, up, down; biases
    whole = 1024 * 768 + 12 * (768 + 768 + 4 * 768) + 2 * 768  # positions; biases of o and down, two norms; final norm
    assert plan.weight_bytes == 2 * (12_576 * 768 + divided // 4 + whole)
    for vocabulary, degree, rows in (
        (50257, 2, 25152),
        (49155, 2, 24608),
        (49155, 8, 6152),
        (50257, 3, 16768),
        (50304, 2, 25152),
        (129280, 8, 16160),
        (17, 2, 17),
    ):
        assert TokenEmbedding(n_vocab=vocabulary, d_model=8).shard(degree).n_vocab == rows
        assert Head(n_vocab=vocabulary, d_model=8).shard(degree).n_vocab == rows
        assert TiedHead(n_vocab=vocabulary, d_model=8).shard(degree).n_vocab == rows
        assert SharedEmbedding(n_vocab=vocabulary, d_model=8).shard(degree).n_vocab == rows


def test_for_notebooks_and_documents() -> None:
    plan = serve(LLAMA, "h100-sxm", name="<b>mine|yours</b>")
    assert "&lt;b&gt;mine" in plan._repr_html_()
    assert "<b>mine" not in plan._repr_html_()
    text = plan.markdown()
    for table in plan.tables():
        widths = {
            line.replace("\\|", "").count("|")
            for line in text.split(f"### {table.title}")[1].split("###")[0].splitlines()
            if line.startswith("|")
        }
        assert widths == {len(table.columns) + 1}
