"""One small model, worked out by hand on a small machine: each degree alone and together, as literals with the sums.

Nothing of asbuilt.cost or asbuilt.plan stands on the right of an `==` here. Times are in microseconds.

The model: vocabulary V = 1,000, width M = 64, L = 4 layers of 8 heads of 12 with 4 key/value heads, SwiGLU of 160,
RMSNorm, rotary positions, a head of its own; bf16. Bytes of its weights:

    embedding       1,000 x 64 x 2                                        = 128,000
    attention   4 x (96 x 64 + 48 x 64 + 48 x 64 + 64 x 96) x 2           = 147,456     36,864 a layer
    ffn         4 x 3 x 160 x 64 x 2                                      = 245,760     61,440 a layer
    norm        (4 x 2 x 64 + 64) x 2                                     =   1,152
    head            1,000 x 64 x 2                                        = 128,000
                                                                            650,368

The machine: 10 MB, 1 GB/s (1 byte is 1 ns), 4 GFLOP/s, a link of 100 MB/s within nodes of 4, 20 MB/s between them.
A token's cache: 4 layers x 2 x 48 numbers x 2 bytes = 768 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asbuilt import InputError
from asbuilt.catalog.machine import Link, Machine
from asbuilt.plan import Conventions, ServePlan, serve
from asbuilt.plan.serve.report import compare
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    TokenEmbedding,
)

ATTENTION = Attention(d_model=64, n_heads=8, n_kv_heads=4, d_head=12, positions=Rotary(d_rotary=12))


def model(ffn: GatedMLP | MixtureOfExperts, layers: int = 4) -> Model:
    block = Block(
        branches=(
            Branch(name="attention", norm=RMSNorm(d=64), body=ATTENTION),
            Branch(name="ffn", norm=RMSNorm(d=64), body=ffn),
        )
    )
    return Model(
        name="toy",
        embedding=TokenEmbedding(n_vocab=1000, d_model=64),
        blocks=(block,) * layers,
        norm=RMSNorm(d=64),
        head=Head(d_model=64, n_vocab=1000),
        max_positions=4096,
    )


DENSE = model(GatedMLP(d_model=64, d_ff=160, activation="silu"))
SPARSE = model(
    MixtureOfExperts(
        d_model=64, d_ff=40, n_experts=8, activation="silu", router=Router(d_model=64, n_experts=8, top_k=2)
    )
)
MACHINE = Machine(
    name="small", memory_gb=0.01, bandwidth=1e9, rates={"bf16": 4e9}, link=Link(kind="wire", bandwidth=1e8)
)
CONVENTIONS = Conventions(workspace=50_000, node=4, network=2e7, targets="minimum")
US = 1e-6


def ask(spec: Model = DENSE, conventions: Conventions = CONVENTIONS, **asked: Any) -> ServePlan:  # noqa: ANN401
    return serve(
        spec, MACHINE, **{"context": 100, "prompt": 100, "chunk": 32, "users": 5, "conventions": conventions} | asked
    )


def bytes_of(plan: ServePlan) -> dict[str, float]:
    return {line.name: line.value for line in (*plan.ladder, *plan.counted)}


def seconds_of(plan: ServePlan) -> dict[str, float]:
    assert plan.decode is not None
    return {c.kind: c.seconds / US for c in plan.decode.run.components if c.seconds}


def step(plan: ServePlan) -> float:
    assert plan.decode is not None
    assert plan.decode.tokens_per_second == pytest.approx(plan.decode.batch / plan.decode.seconds_per_step)
    return plan.decode.seconds_per_step / US


def close(value: Any) -> Any:  # noqa: ANN401
    return pytest.approx(value, rel=1e-9)


def test_one_device_s_memory() -> None:
    """10 MB, a tenth of it left; 100 tokens are 7 pages of 16.

    Activations of a chunk of 32 tokens: positions 32 x 8 = 256 and tables of cos and sin 2 x 32 x 12 x 2 = 1,536; the
    stream 32 x 64 x 2 = 4,096; the normed stream too; q 6,144 and k and v 3,072 each, 12,288; turning q and k takes
    3 x (6,144 + 3,072) = 27,648, more than attending. In all 1,792 + 4,096 + 4,096 + 12,288 + 27,648 = 49,920.
    """
    plan = ask()
    assert bytes_of(plan) == {
        "device memory": 10_000_000,
        "reserve": 1_000_000,
        "weights": 650_368,
        "activations": 49_920,
        "logits and sampler": 50_000,  # 5 x 1,000 x (2 + 4 + 4)
        "graphs and workspace": 50_000,
        "cache budget": 8_199_712,
        "cache per user": 86_016,  # 7 pages x 16 tokens x 768
        "cache tokens": 9_532,  # floor(8,199,712 x 100 / 86,016 = 9,532.77)
        "users that fit": 85,  # floor(8,249,712 / 96,016 = 85.92): each has cache and logits
    }
    assert (plan.weight_bytes, plan.kv_budget_bytes, plan.cache_tokens, plan.users) == (650_368, 8_199_712, 9_532, 85)
    assert plan.fits
    assert not ask(users=86).fits
    assert plan.caches is not None
    assert (plan.caches.minimum, plan.caches.object, plan.caches.paged) == (76_800, 76_800, 86_016)
    assert {c.kind: c.stored for c in plan.prefill.run.components} == {
        "embedding": 128_000,
        "attention": 147_456,
        "ffn": 245_760,
        "norm": 1_152,
        "head": 128_000,
    }


def test_one_device_s_step() -> None:
    """Five sequences at 100 tokens.

    embedding: 5 rows x 128 bytes = 640 ns. attention: 147,456 + 5 x 76,800 = 531,456 bytes; FLOPs 5 x 4 x (2 x 18,432
    of the maps + 2 x 2 x 8 x 12 x 100 of scores and mixing) = 1,505,280, 376.32 us: bytes bind. ffn: 245,760 bytes;
    5 x 4 x 2 x 30,720 = 1,228,800 FLOPs, 307.2 us: FLOPs bind. norm: 1,152. head: 128,000; 640,000 FLOPs, 160 us.
    """
    plan = ask()
    assert seconds_of(plan) == close(
        {"embedding": 0.64, "attention": 531.456, "ffn": 307.2, "norm": 1.152, "head": 160.0}
    )
    assert step(plan) == close(1_000.448)
    assert plan.decode is not None
    assert plan.decode.batch == 5
    assert plan.decode.tokens_per_second == close(5e6 / 1_000.448)
    assert plan.decode.tokens_per_second_per_user == close(1e6 / 1_000.448)
    assert plan.decode.memory_tokens_per_second == close(5e6 / 907.008)  # 640 + 531,456 + 245,760 + 1,152 + 128,000
    assert plan.decode.compute_tokens_per_second == close(5e6 / 843.52)
    assert plan.decode.overlapped_seconds == close(907.008 * US)
    assert plan.decode.bound == "memory"
    components = {
        c.kind: (c.weights, c.lookups, c.cache, c.products, c.scores, c.bound) for c in plan.decode.run.components
    }
    assert components == {
        "embedding": (0, 640, 0, 0, 0, "memory"),
        "attention": (147_456, 0, 384_000, 737_280, 768_000, "memory"),
        "ffn": (245_760, 0, 0, 1_228_800, 0, "compute"),
        "norm": (1_152, 0, 0, 0, 0, "memory"),
        "head": (128_000, 0, 0, 640_000, 0, "compute"),
    }


def test_one_device_s_prompt() -> None:
    """100 tokens in chunks of 32, 32, 32 and 4, each of which reads all weights and makes one row of logits.

    attention: FLOPs 2 x 18,432 x 4 for each token, and 2 x 2 x 96 x 4 = 1,536 for each of 528, 1,552, 2,576 and 394
    pairs: 1,382.4 + 1,775.616 + 2,168.832 + 298.752 us. ffn: 3 x 1,966.08, and 245.76 where bytes and FLOPs take as
    long. norm 4 x 1.152. head 4 x 128. embedding 100 x 128 ns.
    """
    plan = ask()
    assert plan.prefill.seconds / US == close(5_625.6 + 6_144 + 4.608 + 512 + 12.8)
    assert plan.prefill.bound == "compute"
    run = plan.prefill.run
    assert run.rows == 100
    found = {c.kind: (c.weights, c.lookups, c.cache, c.products, c.scores) for c in run.components}
    assert found == {
        "embedding": (0, 12_800, 0, 0, 0),
        "attention": (589_824, 0, 224_256, 14_745_600, 7_756_800),  # caches of 32, 64, 96 and 100 tokens are read
        "ffn": (983_040, 0, 0, 24_576_000, 0),
        "norm": (4_608, 0, 0, 0, 0),
        "head": (512_000, 0, 0, 512_000, 0),
    }
    assert run.compute_seconds / US == close((14_745_600 + 7_756_800 + 24_576_000 + 512_000) / 4e3)
    assert run.memory_seconds / US == close(12.8 + 589.824 + 224.256 + 983.04 + 4.608 + 512)
    # of the last chunk's ffn bytes and FLOPs take as long: then it is the bytes that bind
    assert next(c.binding for c in run.components if c.kind == "ffn") == (245_760, 23_592_960, 0)
    assert next(c.bound for c in ask(context=4, prompt=4).prefill.run.components if c.kind == "ffn") == "memory"


@pytest.mark.parametrize(("prompt", "runs"), [(2048, 64), (2049, 63), (2080, 64), (4096, 64)])
def test_a_long_prompt_is_reckoned_in_64_longer_chunks(prompt: int, runs: int) -> None:
    """Each of which reads the head's 128,000 bytes: 2,049 tokens in 63 chunks of 33, the last one of 3."""
    plan = ask(context=4096, prompt=prompt)
    assert next(c for c in plan.prefill.run.components if c.kind == "head").weights == runs * 128_000


def test_two_tensor_parallel_devices() -> None:
    """Half of all but the norms; sums after attention and ffn of every layer, 2 (2 - 1) / 2 times what is summed.

    Activations: q 3,072, k and v 1,536 each; ffn's 32 x 2 x (3 x 80 + 64) = 19,456 with normed and unnormed stream is
    the most: 1,792 + 4,096 + 19,456 + 2 x 4,096 = 33,536.
    """
    plan = ask(tp=2)
    found = bytes_of(plan)
    assert (found["weights"], found["activations"], found["cache per user"]) == (325_760, 33_536, 43_008)
    assert found["logits and sampler"] == 50_000  # the sampler sees the whole vocabulary
    assert plan.users == 162  # floor(8,590,704 / 53,008 = 162.06)
    assert plan.layout.gpus == 2
    # attention: 73,728 + 192,000 bytes; ffn: 614,400 FLOPs; head: 320,000 FLOPs
    assert seconds_of(plan) == close(
        {"embedding": 0.64, "attention": 265.728, "ffn": 153.6, "norm": 1.152, "head": 80.0}
    )
    assert plan.decode is not None
    assert plan.decode.run.link_seconds / US == close(51.2)  # 8 sums x 5 x 64 x 2 bytes at 100 MB/s
    assert step(plan) == close(501.12 + 51.2)
    assert plan.decode.overlapped_seconds / US == close(454.4)  # bytes; FLOPs take 421.76


def test_four_tensor_parallel_devices() -> None:
    """A quarter; a ring of four passes each number on 2 x 3 / 4 times."""
    plan = ask(tp=4)
    found = bytes_of(plan)
    assert found["weights"] == (128_000 + 147_456 + 245_760 + 128_000) // 4 + 1_152
    assert found["cache per user"] == 21_504
    assert plan.decode is not None
    assert plan.decode.run.link_seconds / US == close(51.2 * 1.5)


def test_eight_tensor_parallel_devices_in_two_nodes() -> None:
    """Key/value heads are there twice, and the sums, passed on 2 x 7 / 8 times, go at 20 MB/s."""
    plan = ask(tp=8)
    found = bytes_of(plan)
    # each has 1 head and 1 key/value head, 12 x 64 numbers in each of four maps
    assert found["weights"] == 128_000 // 8 + 4 * 4 * 12 * 64 * 2 + 245_760 // 8 + 1_152 + 128_000 // 8
    assert found["cache per user"] == 21_504
    assert plan.decode is not None
    assert plan.decode.run.link_seconds / US == close(51.2 * 1.75 * 5)
    near = ask(tp=8, conventions=replace(CONVENTIONS, node=8))
    assert near.decode is not None
    assert near.decode.run.link_seconds / US == close(51.2 * 1.75)
    assert len(plan.warnings) == len(near.warnings) + 1


def test_two_stages() -> None:
    """Two layers each, with the embedding before or final norm and head behind them: 325,120 and 325,248 bytes.

    Five sequences are portions of 3 and 2, and a step takes the slower stage's time for 3 twice. The second stage:
    attention 73,728 + 3 x 38,400 = 188,928 bytes; ffn 122,880; norms 2 x 256 + 128; head 128,000. The first: 3 rows
    of 128 bytes looked up, and 3 x 64 x 2 bytes handed on at 100 MB/s, 3.84 us.
    """
    plan = ask(pp=2)
    found = bytes_of(plan)
    assert (plan.weight_bytes, found["weights"], found["cache per user"]) == (325_248, 325_248, 43_008)
    assert found["activations"] == 49_920
    assert found["logits and sampler"] == 50_000
    assert plan.users == 161  # of the second: floor(8,574,832 / 53,008 = 161.76); the first has no logits to keep
    assert seconds_of(plan) == close({"attention": 188.928, "ffn": 122.88, "norm": 0.64, "head": 128.0})
    assert step(plan) == close(2 * 440.448)
    assert plan.decode is not None
    assert plan.decode.batch == 5
    assert (plan.decode.run.rows, plan.decode.run.times, plan.decode.run.link_seconds) == (3, 2, 0)
    assert plan.decode.overlapped_seconds / US == close(2 * 440.448)  # bytes bind in every component
    # a prompt passes both, and its rows are handed on once: 100 x 128 bytes; what is stored is the first one's
    assert {c.kind: c.stored for c in plan.prefill.run.components} == {
        "embedding": 128_000,
        "attention": 73_728,
        "ffn": 122_880,
        "norm": 512,
        "head": 0,
    }
    assert plan.prefill.seconds / US == close(12_299.008 + 128)
    assert plan.prefill.run.link_seconds / US == close(128)


def test_documents_say_what_a_step_is_made_of() -> None:
    """Eight sums of 5 x 128 bytes over a link; two runs of three rows; a prompt's rows handed on once."""
    found = ask(tp=2).document()["decode"]
    assert (found["rows"], found["times"], found["link_seconds"]) == (5, 1, close(51.2 * US))
    assert (found["memory_seconds"], found["compute_seconds"]) == (close(454.4 * US), close(421.76 * US))
    piped = ask(pp=2).document()
    assert (piped["decode"]["rows"], piped["decode"]["times"], piped["decode"]["batch"]) == (3, 2, 5)
    assert piped["decode"]["memory_seconds"] == close(2 * 440.448 * US)
    assert (piped["prefill"]["rows"], piped["prefill"]["times"]) == (100, 1)
    assert piped["prefill"]["link_seconds"] == close(128 * US)
    assert piped["layout"] == {"gpus": 2, "tp": 1, "pp": 2, "ep": 1, "redundant_experts": 0, "replicas": 1}


def test_a_slow_first_stage_sets_the_pace() -> None:
    """Two nodes of one device joined at 1 MB/s: 3 x 64 x 2 bytes handed on take 384 us."""
    plan = ask(pp=2, conventions=replace(CONVENTIONS, node=1, network=1e6))
    assert seconds_of(plan) == close({"embedding": 0.384, "attention": 188.928, "ffn": 122.88, "norm": 0.512})
    assert step(plan) == close(2 * (312.704 + 384))
    assert plan.decode is not None
    assert plan.decode.bound == "link"
    assert plan.decode.overlapped_seconds / US == close(2 * 384)
    assert any("pipeline stages span several nodes of 1" in warning for warning in plan.warnings)


def test_three_stages_of_four_layers() -> None:
    """2, 1 and 1: the first holds the most, 128,000 + 2 x (36,864 + 61,440 + 256)."""
    plan = ask(pp=3, users=6)
    assert plan.weight_bytes == 325_120
    found = bytes_of(plan)
    # the last has 9,000,000 - 226,688 - 49,920 - 50,000 for users of 21,504 + 10,000, which is more users: 275
    assert found["weights"] == 325_120
    assert found["logits and sampler"] == 0
    assert plan.users == 199  # floor(8,574,960 / 43,008 = 199.38)
    assert plan.decode is not None
    assert (plan.decode.run.rows, plan.decode.run.times) == (2, 3)
    # first: 2 rows, attention 73,728 + 2 x 38,400, ffn 122,880, norms 512; handed on: 2 x 128 bytes
    assert step(plan) == close(3 * (0.256 + 150.528 + 122.88 + 0.512 + 2.56))


def test_four_copies() -> None:
    """Four times the users; five sequences are two on the busiest copy."""
    plan = ask(gpus=4, tp=1, pp=1)
    assert (plan.users, plan.layout.replicas) == (4 * 85, 4)
    assert bytes_of(plan)["logits and sampler"] == 20_000
    assert bytes_of(plan)["users that fit"] == 340
    # attention 147,456 + 2 x 76,800 bytes, and 2 rows
    assert step(plan) == close(0.256 + 301.056 + 245.76 + 1.152 + 128)
    assert plan.decode is not None
    assert plan.decode.run.link_seconds == 0


def test_copies_of_two_stages_of_two_devices() -> None:
    """Eight devices, two copies: three sequences each, in portions of 2 and 1.

    The last stage: attention 36,864 + 2 x 19,200 bytes; ffn 61,440; norm 640; head 64,000; 4 sums of 2 x 128 bytes.
    """
    plan = ask(tp=2, pp=2, gpus=8)
    assert (plan.layout.replicas, plan.layout.per_copy, plan.layout.groups) == (2, 4, 1)
    assert seconds_of(plan) == close({"attention": 75.264, "ffn": 61.44, "norm": 0.64, "head": 64.0})
    assert plan.decode is not None
    assert plan.decode.run.link_seconds / US == close(2 * 10.24)
    assert step(plan) == close(2 * (201.344 + 10.24))
    assert bytes_of(plan)["weights"] == 64_000 + 2 * (18_432 + 30_720 + 256) + 128
    assert bytes_of(plan)["logits and sampler"] == 30_000
    # in nodes of 2 stages hand on at 1 MB/s: 2 x 128 bytes beside the sums, and the first stage sets the pace
    apart = ask(tp=2, pp=2, gpus=8, conventions=replace(CONVENTIONS, node=2, network=1e6))
    assert step(apart) == close(2 * (0.256 + 75.264 + 61.44 + 0.512 + 10.24 + 256))


def test_experts_on_one_device() -> None:
    """8 experts of 3 x 40 x 64, of which 5 rows of 2 are expected to touch 8 x (1 - 0.75^5), 76.26953125%.

    Of 40,960 bytes of each stack that is 31,240; FLOPs are those of 10 rows: 4 x 3 x 2 x 10 x 40 x 64.
    """
    plan = ask(SPARSE)
    assert plan.decode is not None
    found = {c.kind: (c.stored, c.weights, c.products) for c in plan.decode.run.components}
    assert found["ffn"] == (491_520, 374_880, 614_400)
    assert found["router"] == (4_096, 4_096, 20_480)
    assert step(plan) == close(0.64 + 531.456 + 374.88 + 1.152 + 5.12 + 160)


def test_experts_over_four_devices() -> None:
    """Two experts each, and each device attends for sequences of its own: 2 of the 5.

    8 rows choose 16 experts, of which a device computes 4 rows and reads 1 - 0.75^8 of its 10,240 bytes of each stack:
    9,214.8 of them. Its own 2 rows go to 2 experts each and come back, 3 of 4 times to another: 2 x 4 x 64 x 2 x
    3/4 bytes in each layer.
    """
    plan = ask(SPARSE, tp=1, ep=4)
    assert (plan.layout.gpus, plan.layout.groups, plan.layout.copies) == (4, 4, 1)
    assert plan.decode is not None
    found = {c.kind: (c.stored, c.weights, c.products) for c in plan.decode.run.components}
    assert found["ffn"] == (122_880, 12 * 9_215, 4 * 3 * 2 * 4 * 40 * 64)
    assert found["router"] == (4_096, 4_096, 4 * 2 * 2 * 8 * 64)
    assert found["attention"][0] == 147_456
    assert plan.decode.run.link_seconds / US == close(4 * 2 * 4 * 64 * 2 * 0.75 / 100)
    assert bytes_of(plan)["activations"] == 49_920  # attention's, as above: experts work in 31,360 bytes
    assert plan.users == 348  # 4 x floor((9,000,000 - 531,584 - 49,920 - 50,000) / 96,016 = 87.15)
    apart = ask(SPARSE, tp=1, ep=4, conventions=replace(CONVENTIONS, node=2))
    assert apart.decode is not None
    assert apart.decode.run.link_seconds == close(5 * plan.decode.run.link_seconds)


def test_a_branch_is_summed_once() -> None:
    """Of experts with a shared one beside them each device adds up its own before they are summed."""
    body = MixtureOfExperts(
        d_model=64,
        d_ff=40,
        n_experts=8,
        activation="silu",
        router=Router(d_model=64, n_experts=8, top_k=2),
        shared=GatedMLP(d_model=64, d_ff=40, activation="silu"),
    )
    plan = ask(model(body), tp=2)
    assert plan.decode is not None
    assert plan.decode.run.link_seconds / US == close(51.2)


def test_small_numbers_of_parameters_are_not_rounded() -> None:
    """Table and head of 40, a block of 96 + 4, a norm of 4: 184."""
    block = Block(
        branches=(Branch(name="ffn", norm=RMSNorm(d=4), body=GatedMLP(d_model=4, d_ff=8, activation="silu")),)
    )
    spec = Model(
        name="tiny",
        embedding=TokenEmbedding(n_vocab=10, d_model=4),
        blocks=(block,),
        norm=RMSNorm(d=4),
        head=Head(d_model=4, n_vocab=10),
        max_positions=4096,
    )
    plan = ask(spec, replace(CONVENTIONS, flops="2n-rounded"), users=1)
    assert plan.decode is not None
    assert sum(c.flops for c in plan.decode.run.components) == close(2 * 184)


def test_half_a_byte_of_a_table_is_one() -> None:
    """Of 11 rows of 5 numbers in 4 bits one is 2.5 bytes, and all are 27.5."""
    block = Block(
        branches=(Branch(name="ffn", norm=RMSNorm(d=5), body=GatedMLP(d_model=5, d_ff=8, activation="silu")),)
    )
    spec = Model(
        name="odd",
        embedding=TokenEmbedding(n_vocab=11, d_model=5),
        blocks=(block,),
        norm=RMSNorm(d=5),
        head=Head(d_model=5, n_vocab=11),
        max_positions=4096,
    )
    for embedding, found in (("lookup", (0, 3)), ("read", (28, 3))):
        plan = ask(spec, replace(CONVENTIONS, embedding=embedding), users=1, dtype="int4")
        assert plan.decode is not None
        table = next(c for c in plan.decode.run.components if c.kind == "embedding")
        assert (table.weights, table.lookups) == found


def test_experts_and_tensors_together() -> None:
    """tp 4, ep 2: each of two groups of experts is divided by two; sums after attention and after experts."""
    plan = ask(SPARSE, tp=4, ep=2)
    assert (plan.layout.gpus, plan.layout.groups) == (4, 1)
    assert plan.decode is not None
    found = {c.kind: c.stored for c in plan.decode.run.components}
    assert found["ffn"] == 491_520 // 4
    sums = 8 * 5 * 64 * 2 * 1.5
    experts = 4 * 2 * 10 * 64 * 2 * 0.5
    assert plan.decode.run.link_seconds / US == close((sums + experts) / 100)


def test_the_knee() -> None:
    """At 4,096 tokens bytes of the cache outgrow FLOPs; at 1 token a batch of 5 takes longer over FLOPs.

    Bytes of a step at 1 token: 522,368 + 896 b. FLOPs over 4: b (147,456 + 1,536 + 245,760 + 128,000) / 4 = 130,688 b.
    The batch is 522,368 / (130,688 - 896) = 4.02, rounded up.
    """
    assert ask(context=1, prompt=1).knee == 5
    assert ask(context=4096, prompt=1, users=1).knee is None
    fast = serve(DENSE, replace(MACHINE, rates={"bf16": 1e6}), context=1, prompt=1, conventions=CONVENTIONS)
    assert fast.knee == 1
    # at 1.5 GFLOP/s one sequence's 522,752 FLOPs take 348.5 us, less than 523.3 of bytes; two sequences' take 697
    second = serve(DENSE, replace(MACHINE, rates={"bf16": 1.5e9}), context=1, prompt=1, conventions=CONVENTIONS)
    assert second.knee == 2
    # at 570 GFLOP/s a sequence's FLOPs take 917.109 ns, 21.109 more than its bytes: 522,368 / 21.109 = 24,746.4
    far = serve(DENSE, replace(MACHINE, rates={"bf16": 5.7e11}), context=1, prompt=1, conventions=CONVENTIONS)
    assert far.knee == 24_747


def test_fp8_weights_with_scores_in_bf16() -> None:
    """Products of weights go at the fp8 rate, scores at that of the activations; bytes of weights are halved."""
    machine = replace(MACHINE, rates={"bf16": 1e8, "fp8": 2e8})
    plan = serve(DENSE, machine, context=100, users=5, dtype="fp8", conventions=CONVENTIONS)
    assert plan.decode is not None
    seconds = {c.kind: c.compute_seconds / US for c in plan.decode.run.components}
    assert seconds["attention"] == close(737_280 / 200 + 768_000 / 100)
    assert seconds["ffn"] == close(1_228_800 / 200)
    assert plan.weight_bytes == 325_184
    assert bytes_of(plan)["cache per user"] == 86_016  # in bf16, as activations are


def test_a_cache_in_eight_bits() -> None:
    """Half of it, but in our cache object, which is in the activations' dtype; weights are as they were."""
    plan = ask(kv_dtype="fp8")
    assert plan.caches is not None
    assert (plan.caches.minimum, plan.caches.object, plan.caches.paged) == (38_400, 76_800, 43_008)
    assert bytes_of(plan)["cache per user"] == 43_008
    assert plan.users == 155  # floor(8,249,712 / 53,008 = 155.63)
    assert seconds_of(plan)["attention"] == close(376.32)  # FLOPs bind: bytes are 147,456 + 5 x 38,400
    assert plan.document()["kv_dtype"] == "fp8"


def test_efficiencies_are_shares() -> None:
    half = ask(bandwidth_efficiency=0.5)
    assert seconds_of(half)["attention"] == close(2 * 531.456)
    assert seconds_of(half)["ffn"] == close(2 * 245.76)
    slow = ask(compute_efficiency=0.25)
    assert seconds_of(slow)["ffn"] == close(4 * 307.2)
    assert half.document()["efficiency"] == {"bandwidth": 0.5, "compute": 1.0}
    assert slow.document()["efficiency"] == {"bandwidth": 1.0, "compute": 0.25}


def test_conventions_one_by_one() -> None:
    """What each switch changes, and by how much."""

    def users(**switch: Any) -> int | None:  # noqa: ANN401
        return ask(conventions=replace(CONVENTIONS, **switch)).users

    assert users(memory="binary") == 92  # 10,737,418 - 1,073,742 - 750,288 = 8,913,388
    assert users(count="nearest") == 86  # of 85.92
    assert users(utilisation=1.0) == 96  # 9,249,712
    assert users(reserve=500_000) == 80  # 7,749,712
    assert users(overhead=100_000) == 95  # 8,249,632 / 86,016 = 95.91: logits are in the overhead
    assert users(workspace=150_000) == 84
    assert users(page=False) == 95  # 76,800 + 10,000 each: 95.04
    assert users(block_size=64) == 76  # 128 tokens, 98,304 + 10,000
    read = ask(conventions=replace(CONVENTIONS, embedding="read"))
    assert seconds_of(read)["embedding"] == close(128.64)
    full = ask(conventions=replace(CONVENTIONS, scores="full"))
    attention = next(c for c in full.prefill.run.components if c.kind == "attention")
    assert attention.scores == 1_536 * (32 * 32 + 32 * 64 + 32 * 96 + 4 * 100)
    counted = ask(conventions=replace(CONVENTIONS, flops="2n"))
    assert counted.decode is not None
    # all 325,184 parameters, 2 FLOPs each, spread as the declared products of 2,606,080
    ffn = next(c for c in counted.decode.run.components if c.kind == "ffn")
    assert ffn.flops == close(2 * 325_184 * 5 * 1_228_800 / 2_606_080)
    assert sum(c.flops for c in counted.decode.run.components) == close(2 * 325_184 * 5)
    rounded = ask(conventions=replace(CONVENTIONS, flops="2n-rounded"))
    assert rounded.decode is not None
    assert sum(c.flops for c in rounded.decode.run.components) == close(2 * 325_000 * 5)


def test_a_processor_keeps_nothing_back_for_graphs() -> None:
    card, processor = (
        serve(DENSE, replace(MACHINE, memory_gb=2.0, kind=kind), context=100) for kind in ("accelerator", "cpu")
    )
    assert bytes_of(card)["graphs and workspace"] == 2**30
    assert bytes_of(processor)["graphs and workspace"] == 0


def test_four_stages_of_which_two_are_alike() -> None:
    """A layer each; a prompt passes all four, and its 100 rows of 128 bytes are handed on three times."""
    plan = ask(pp=4)
    assert plan.weight_bytes == 128_000 + 36_864 + 61_440 + 256 + 128
    assert plan.prefill.run.link_seconds / US == close(3 * 128)
    assert plan.prefill.seconds / US == close(12_299.008 + 3 * 128)
    found = {c.kind: (c.weights, c.products) for c in plan.prefill.run.components}
    assert found["ffn"] == (983_040, 24_576_000)


def test_what_other_conventions_answer() -> None:
    """Those alone that answer otherwise, each as the plan by that convention does.

    With all of 10 x 2^30 / 10^3 bytes 92 users; 85.92 rounded are 86; the whole table read is 128 us more. By 2N all
    FLOPs are 2 x 325,184 x 5 in place of 2,606,080: ffn 383.32 us and head 199.65 where they took 307.2 and 160.
    """
    found = {(a.switch, a.value): (a.users, a.tokens_per_second) for a in ask().alternatives}
    more, rounded = 2 * 325_184 * 5 / 2_606_080, 2 * 325_000 * 5 / 2_606_080
    rest = 0.64 + 531.456 + 1.152
    shown = rows_of(ask(), "Conventions that matter here")
    assert shown["--memory binary"][:2] == ("92", "4,998")
    assert shown["--embedding read"][:2] == ("85", "4,431")
    assert found == {
        ("memory", "binary"): (92, close(5e6 / 1_000.448)),
        ("count", "nearest"): (86, close(5e6 / 1_000.448)),
        ("embedding", "read"): (85, close(5e6 / (1_000.448 + 128))),
        ("flops", "2n"): (85, close(5e6 / (rest + more * 467.2))),
        ("flops", "2n-rounded"): (85, close(5e6 / (rest + rounded * 467.2))),
    }


def test_other_conventions_within_a_target() -> None:
    """In 1,100 us five are served, for which 1,000.448 are needed; with the whole table read, 128 us more, only four.

    Four: 0.512 + 454.656 + 245.76 + 1.152 + 128. Six: 0.768 + 608.256 + 368.64 + 1.152 + 192.
    """
    plan = ask(users=None, latency_target=1.1e-3)
    assert plan.users == 5
    found = {(a.switch, a.value): (a.users, a.tokens_per_second) for a in plan.alternatives}
    assert found["embedding", "read"] == (4, close(5e6 / (1_000.448 + 128)))
    assert not {switch for switch, _ in found} & {"memory", "count"}  # there is room for more by any


def rows_of(plan: ServePlan, title: str) -> dict[Any, tuple[Any, ...]]:
    """The rows of the table whose title starts so, by their first cell."""
    table = next(table for table in plan.tables() if table.title.startswith(title))
    return {row[0]: tuple(row[1:]) for row in table.rows}


def test_the_answer_s_table() -> None:
    found = rows_of(ask(), "toy in bf16 on small, 100 tokens")
    expected = {name: found.pop(name) for name in [*found] if name.startswith("expected")}
    assert [*expected] == [
        "expected time to first token, prompt of 100",
        "expected time per token, batch 5",
        "expected tokens/s",
    ]
    assert found == {
        "fits": ("yes",),
        "users at 100 tokens": ("85",),
        "tokens in the cache": ("9,532",),
        "largest context for 5 users": ("2,128",),
        "largest batch": ("85",),
        "smallest single card": (ask().smallest_card,),
        "fewest small": ("1",),
        "minimum time to first token, prompt of 100": ("12.3 ms, compute-bound",),
        "minimum time per token, batch 5": ("1 ms, memory-bound",),
        "maximum tokens/s, total and per user": ("4,998, 999.6",),
    }
    # five users of 133 pages of 16 x 768 bytes and their logits are 8,221,520 of 8,249,712; of 134, 8,282,960
    assert ask(context=2128).fits
    assert not ask(context=2129).fits
    assert rows_of(ask(users=1), "toy in bf16")["largest context for 1 user"] == ("4,096 (the model's maximum)",)
    none = rows_of(ask(users=500_000), "toy in bf16")
    assert none["fewest small"] == ("none of the counts tried",)
    late = rows_of(ask(tp=2, latency_target=500e-6), "toy in bf16 on 2 x small (tp 2, pp 1, ep 1)")
    assert late["fits"] == ("no: time per token above the target",)
    # four users: 0.512 + 227.328 + 122.88 + 1.152 + 64 us, and 40.96 of links; five take 552.32
    assert late["users at 100 tokens within the targets"] == ("4 of 162 that fit",)


def test_the_table_of_components() -> None:
    """Weights moved are those read and rows looked up; FLOPs are those of one of the five tokens."""
    assert rows_of(ask(), "Bytes, FLOPs and time on one device in one decode pass of 5 sequences") == {
        "embedding": (128_000, 640, 0, 0, "0.64 µs", "memory"),
        "norm": (1_152, 1_152, 0, 0, "1.15 µs", "memory"),
        "attention": (147_456, 147_456, 384_000, 301_056, "531 µs", "memory"),
        "ffn": (245_760, 245_760, 0, 245_760, "307 µs", "compute"),
        "head": (128_000, 128_000, 0, 128_000, "160 µs", "compute"),
        "total": (650_368, 523_008, 384_000, 674_816, "1 ms", "memory"),
    }
    piped = rows_of(ask(pp=2), "Bytes, FLOPs and time on one device in one decode pass of 3 sequences at 100 tokens, 2")
    titles = [
        table.title for plan in (ask(), ask(pp=2)) for table in plan.tables() if table.title.startswith("Bytes, FLOPs")
    ]
    assert [title.partition("at 100 tokens")[2] for title in titles] == ["", ", 2 per step"]
    assert piped["total"] == (
        325_248,
        325_248,
        115_200,
        2 * (18_432 + 30_720) * 2 + 76_800 + 128_000,
        "881 µs",
        "memory",
    )
    assert "total, with links" in rows_of(ask(tp=2), "Bytes, FLOPs")


def test_the_tables_of_times() -> None:
    times = rows_of(ask(tp=2), "Theoretical minimum of the time, at 1 GB/s, 0.004 TFLOP/s in bf16")
    assert times["decode step"] == ("454 µs", "422 µs", "51.2 µs", "552 µs", "454 µs", "memory")
    assert times["prefill"][2] == "1.02 ms"  # 8 sums of 100 x 128 bytes
    assert rows_of(ask(), "Theoretical minimum")["decode step"][2] == ""
    assert any(
        table.title == "Decode by batch: memory-bound at every batch size"
        for table in ask(context=4096, prompt=1, users=1).tables()
    )
    sweep = rows_of(ask(), "Decode by batch: compute-bound from 6 (the knee)")
    assert sweep[1] == ("599 µs", "599 µs", "169 µs", "1,669", "1,669", "memory", "yes")
    # 32 sequences: 4.096 + (147.456 + 2,457.6) + 1,966.08 + 1.152 + 1,024 us
    assert sweep[32] == ("5.6 ms", "2.98 ms", "5.4 ms", "5,714", "178.6", "compute", "yes")
    assert [sweep[batch][-1] for batch in (64, 128)] == ["yes", "no"]
    exactly = ask(conventions=replace(CONVENTIONS, reserve=2_050_000))  # 6,199,712 / 96,016 = 64.57
    assert exactly.users == 64
    assert rows_of(exactly, "Decode by batch")[64][-1] == "yes"
    caches = rows_of(ask(), "Cache of one sequence of 100 tokens, whole model")
    assert [row[0] for row in caches.values()] == [76_800, 76_800, 86_016]


def test_the_table_from_the_card_to_the_users() -> None:
    rows = rows_of(ask(), "Memory of one device")
    assert {name: row[0] for name, row in rows.items()} == {
        "device memory": 10_000_000,
        "− reserve": 1_000_000,
        "− weights": 650_368,
        "− activations": 49_920,
        "− logits and sampler": 50_000,
        "− graphs and workspace": 50_000,
        "= cache budget": 8_199_712,
        "cache per user": 86_016,
        "cache tokens": 9_532,
        "users that fit": 85,
    }
    assert rows["device memory"][1] == "10.00 MB (9.54 MiB)"
    assert (str(rows["cache per user"][1])[:4], rows["cache tokens"][1]) == ("86.0", "tokens")
    assert rows["cache tokens"][2] == "floor(max(0, cache budget) × context / cache per user)"
    assert rows["− graphs and workspace"][2] == "given"


def test_what_to_change_and_what_is_noted_in_tables() -> None:
    change = rows_of(ask(users=160), "What to change, best first")
    assert change["cache in 8 bits"][:2] == ("--kv-dtype fp8", "insufficient")
    assert change["2 devices: tp 2, pp 1"][:2] == ("--gpus 2", "fits")
    alone = serve(DENSE, replace(MACHINE, link=None), context=4096, conventions=CONVENTIONS)
    assert alone.warnings == ()  # one device needs no link, and 4,096 is as far as the model goes
    assert not any(table.title == "Notes" for table in alone.tables())
    (beyond,) = serve(DENSE, MACHINE, context=4097, conventions=CONVENTIONS).warnings
    assert beyond.startswith("4,097 tokens exceed the model's context of 4,096")
    (unlinked,) = serve(DENSE, replace(MACHINE, link=None), tp=2, conventions=CONVENTIONS).warnings
    assert "no link is known for small" in unlinked
    notes = {line.name: line.note for line in ask().lines}
    assert notes["decode step of 5: attention"] == "memory-bound"
    assert notes["decode step of 5: ffn"] == "compute-bound"


def test_a_model_that_makes_no_tokens() -> None:
    """Its rows see each other, so a prompt is read at once, whatever the chunk; nothing is sampled, and nobody fits."""
    for users in (None, 3):
        plan = serve("bert-base-uncased", "t4", context=100, prompt=100, chunk=16, users=users)
        lines = {line.name: line for line in plan.ladder}
        assert lines["activations"].note.startswith("prefilling 100 tokens at once, in")
        assert lines["logits and sampler"].value == 0
        assert plan.prefill.run.components[0].kind
        assert (
            next(c for c in plan.prefill.run.components if c.kind == "ffn").weights
            == next(c for c in plan.prefill.run.components if c.kind == "ffn").stored
        )
        assert (plan.users, plan.users_that_fit, plan.cache_tokens, plan.counted, plan.fits) == (
            None,
            None,
            None,
            (),
            False,
        )
        assert (plan.sweep, plan.knee, plan.alternatives, plan.suggestions) == ((), None, (), ())
        assert rows_of(plan, plan.title)["fits"] == ("not applicable: it does not generate",)
        notes = next(table for table in plan.tables() if table.title == "Notes")
        assert any(str(row[0]) == "refused: decode" for row in notes.rows)
        assert any(
            table.title == "Bytes, FLOPs and time on one device in one prefill of 100 tokens" for table in plan.tables()
        )
        (row,) = compare([plan]).rows
        assert tuple(row)[3] == "not applicable: it does not generate"
        assert tuple(row)[5:7] == ("-", "-")
        assert tuple(row)[8:] == ("-", "-", "-", "-", plan.prefill.bound)
        assert [line.name for line in plan.lines][-1] == "prefill of 100"


def test_contexts_and_kinds_of_weights_where_nothing_is_said() -> None:
    for name, context in (("llama-3.1-8b", 8192), ("gpt2", 1024)):
        assert serve(name, "h200").context == context
    assert serve("llama-3.1-8b", "h200", context=128_000).context == 128_000
    with pytest.raises(InputError, match="falcon"):  # whose files llama.cpp's quantiser makes by rules of their own
        serve("falcon-7b", "h200", dtype="q4_k_m")


def test_several_plans_in_one_table() -> None:
    piped, sparse = compare([ask(DENSE, pp=2), ask(SPARSE)]).rows
    assert tuple(piped)[:7] == ("toy", "small", "2 (tp 1, pp 2, ep 1)", "yes", "0.00", "161", "4,096")
    assert tuple(piped)[7:] == ("12.4 ms", "5", "881 µs", "5,676", "1,135", "memory")
    assert tuple(sparse)[2] == "1"
    (large,) = compare([serve("llama-3-8b", "h100-sxm", context=8192)]).rows
    assert large[4] == "16.06"  # GB: 8,030,261,248 numbers of two bytes


def test_every_line_and_its_unit() -> None:
    assert [(line.name, line.unit) for line in ask(pp=2).lines] == [
        ("device memory", "bytes"),
        ("reserve", "bytes"),
        ("weights", "bytes"),
        ("activations", "bytes"),
        ("logits and sampler", "bytes"),
        ("graphs and workspace", "bytes"),
        ("cache budget", "bytes"),
        ("cache per user", "bytes"),
        ("cache tokens", "tokens"),
        ("users that fit", "users at this context"),
        ("prefill of 100: embedding", "seconds"),
        ("prefill of 100: norm", "seconds"),
        ("prefill of 100: attention", "seconds"),
        ("prefill of 100: ffn", "seconds"),
        ("prefill of 100: head", "seconds"),
        ("prefill of 100", "seconds"),
        ("decode step of 5: norm", "seconds"),
        ("decode step of 5: attention", "seconds"),
        ("decode step of 5: ffn", "seconds"),
        ("decode step of 5: head", "seconds"),
        ("decode step of 5", "seconds"),
        ("tokens/s", "tokens/s"),
    ]


def test_lines_say_what_is_assumed_and_what_was_given() -> None:
    lines = {line["line"]: line for line in ask(tp=2).document()["ladder"]}
    assert lines["reserve"]["source"] == "utilisation: an assumption, the default of engines"
    assert lines["weights"]["note"] == "one device of tp 2, pp 1, ep 1"
    assert lines["graphs and workspace"]["source"] == "given"
    given = ask(conventions=Conventions(utilisation=0.8)).document()["ladder"]
    alone = {line["line"]: line for line in given}
    assert alone["reserve"]["source"] == "utilisation: given"
    assert alone["graphs and workspace"]["source"] == "an assumption"
    assert alone["weights"]["note"] == ""
    binary = [a for a in ask().document()["alternatives"] if a["switch"] == "memory"]
    assert [(a["value"], a["users"]) for a in binary] == [("binary", 92)]
    assert binary[0]["tokens_per_second"] == close(5e6 / 1_000.448)


def test_where_nobody_fits() -> None:
    """1 MB leaves 900,000 - 650,368 - 49,920 - 50,000 = 149,712 bytes; a user of 200 tokens takes 13 pages, 159,744."""
    tiny = replace(MACHINE, memory_gb=0.001)
    plan = serve(DENSE, tiny, context=200, chunk=32, conventions=CONVENTIONS)
    found = bytes_of(plan)
    assert (found["logits and sampler"], found["cache budget"], found["cache tokens"]) == (0, 149_712, 187)
    assert (plan.fits, plan.users, plan.largest_batch) == (False, 0, 0)
    assert plan.decode is not None
    assert plan.decode.batch == 1
    assert plan.largest_context == 176  # 11 pages and logits: 145,168
    assert serve(DENSE, tiny, context=176, chunk=32, conventions=CONVENTIONS).users == 1
    # with 0.7 MB not even the weights
    none = serve(DENSE, replace(MACHINE, memory_gb=0.0007), context=200, chunk=32, conventions=CONVENTIONS)
    assert (none.kv_budget_bytes, none.cache_tokens, none.users, none.largest_context) == (0, 0, 0, 0)
    assert bytes_of(none)["cache budget"] == 630_000 - 750_288
    assert [(said.fits, said.users) for said in none.suggestions if "still does not fit" in said.effect] == [(False, 0)]
    assert not any(said.switch == "count" for said in none.alternatives)
    assert rows_of(none, "Decode by batch")[1][-1] == "no"
