"""What a part needs while it runs and what can be made again, held to the allocator's peak and to lists made by hand.

Parts are large beside everything around them, so that an error in what they declare is one in what is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import strategies
import torch

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.kernels.memory.attention import AttentionMemory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.masks import AttentionPattern, mask
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    MLP,
    Alibi,
    Attention,
    Block,
    Branch,
    ClampedGate,
    GatedMLP,
    Head,
    LatentAttention,
    LayerNorm,
    LearnedPositions,
    LinearAttention,
    MixtureOfExperts,
    Model,
    Norm,
    Parallel,
    Part,
    Pass,
    RMSNorm,
    Rotary,
    Router,
    TiedHead,
    TokenEmbedding,
    YaRN,
)
from asbuilt.spec.attention import order_matters

WIDTH, TOKENS, BATCH = 64, 128, 2
# With these instructions the library repacks operands in bfloat16 in memory of its own.
REPACKS = torch.cpu._is_amx_tile_supported()


def skip_repacked(dtype: torch.dtype) -> None:
    if REPACKS and dtype == torch.bfloat16:
        pytest.skip("a processor with AMX, for which the library repacks bfloat16")


ROTARY = Rotary(d_rotary=64)
OF_HEAD: dict[str, Norm] = {"rms": RMSNorm(d=64), "layer": LayerNorm(d=64), "gainless": RMSNorm(d=64, gain="none")}


def attention(n_kv_heads: int = 2, **more: Any) -> Attention:  # noqa: ANN401  any field
    return Attention(d_model=WIDTH, n_heads=8, n_kv_heads=n_kv_heads, d_head=64, **more)


def mixture(**more: Any) -> MixtureOfExperts:  # noqa: ANN401  any field
    router = Router(d_model=WIDTH, n_experts=64, top_k=4)
    return MixtureOfExperts(
        **{"d_model": WIDTH, "d_ff": 128, "n_experts": 64, "activation": "silu", "router": router, **more}
    )


def latent(**more: Any) -> LatentAttention:  # noqa: ANN401  any field
    return LatentAttention(
        **{
            "d_model": WIDTH,
            "n_heads": 8,
            "q_rank": 32,
            "kv_rank": 64,
            "d_nope": 32,
            "d_rope": 16,
            "d_value": 32,
            "positions": Rotary(d_rotary=16),
            "q_norm": RMSNorm(d=32),
            "kv_norm": RMSNorm(d=64),
            **more,
        }
    )


def model(body: Any, n_vocab: int = 50, **more: Any) -> Model:  # noqa: ANN401  any body
    branch = Branch(name="x", body=body, norm=RMSNorm(d=WIDTH))
    head = Head(d_model=WIDTH, n_vocab=n_vocab)
    return Model(
        **{
            "embedding": TokenEmbedding(n_vocab=n_vocab, d_model=WIDTH),
            "blocks": (Block(branches=(branch,)),),
            "head": head,
            "max_positions": 512,
            **more,
        }
    )


def peak(
    spec: Model,
    kernel: str,
    *,
    last: bool = True,
    tokens: int = TOKENS,
    dtype: torch.dtype = torch.float32,
    batch: int = BATCH,
) -> int:
    built = strategies.randomised(spec, 0, dtype)
    ids = torch.arange(batch * tokens).view(batch, tokens) * 7 % spec.n_vocab

    def forward() -> None:
        built(ids, kernel=kernel, last=last)  # type: ignore[arg-type]

    with torch.inference_mode():
        forward()
        return measured.peak_bytes(forward)


PARTS: dict[str, Part] = {
    "attention": attention(),
    "turned": attention(positions=ROTARY),
    "turned, one key head": attention(1, positions=ROTARY),
    "turned, as many key heads": attention(8, positions=ROTARY),
    "window": attention(positions=ROTARY, window=32),
    "latent": latent(),
    "plain": MLP(d_model=WIDTH, d_ff=512, activation="relu"),
    "gelu": MLP(d_model=WIDTH, d_ff=512, activation="gelu"),
    "gated": GatedMLP(d_model=WIDTH, d_ff=512, activation="silu"),
    "side by side": Parallel(attention=attention(), ffn=GatedMLP(d_model=WIDTH, d_ff=512, activation="silu")),
}
PARTS |= {f"{kind} norms, turned": attention(positions=ROTARY, q_norm=n, k_norm=n) for kind, n in OF_HEAD.items()}
PARTS |= {f"{kind} norms": attention(q_norm=n, k_norm=n) for kind, n in OF_HEAD.items()}
PARTS |= {
    "queries normed": attention(8, positions=ROTARY, q_norm=OF_HEAD["rms"]),
    "keys normed": attention(8, positions=ROTARY, k_norm=OF_HEAD["rms"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_peak_bytes_is_the_peak_of_the_fused_kernel(name: str) -> None:
    spec = model(PARTS[name])
    run = Pass(tokens=TOKENS, batch=BATCH, width=4, logits="last")
    assert memory(spec).peak_bytes(run) == pytest.approx(peak(spec, "fused"), rel=0.02)


@pytest.mark.parametrize("name", ["attention", "turned", "turned, as many key heads", "window", "rms norms, turned"])
def test_peak_bytes_is_the_peak_of_the_reference_kernel(name: str) -> None:
    """Scores of 2 x 8 x 128 x 128 in float32, twice, are most of it."""
    spec = model(PARTS[name])
    run = Pass(tokens=TOKENS, batch=BATCH, width=4, logits="last", kernel="reference")
    assert 0.9 < memory(spec).peak_bytes(run) / peak(spec, "reference") <= 1.01


def test_peak_bytes_of_narrow_scores_counts_them_widened() -> None:
    """Latent attention whose 2 x 8 x 256 x 256 scores are there in 2 bytes and twice in 4: what is packed is small."""
    spec = model(latent())
    run = Pass(tokens=256, batch=BATCH, width=2, logits="last", kernel="reference")
    assert 0.75 < memory(spec).peak_bytes(run) / peak(spec, "reference", tokens=256, dtype=torch.bfloat16) < 1.05


def test_peak_bytes_of_one_head_counts_its_mask() -> None:
    """512 x 512 scores in float32, twice for each of two texts, and beside them their mask, made in two steps."""
    one = Attention(d_model=WIDTH, n_heads=1, n_kv_heads=1, d_head=64)
    spec = model(one)
    run = Pass(tokens=512, batch=BATCH, width=4, logits="last", kernel="reference")
    assert 0.98 < memory(spec).peak_bytes(run) / peak(spec, "reference", tokens=512) <= 1.01


# Values narrower and wider than keys, without either norm, without positions, without a rank of queries; then queries
# whose rank, turned part or plain part is most of what is there.
LATENTS: dict[str, LatentAttention] = {
    "narrow values": latent(d_value=8),
    "wide values": latent(d_value=96),
    "no norms": latent(q_norm=None, kv_norm=None),
    "not turned": latent(positions=None),
    "no rank": latent(q_rank=None, q_norm=None),
    "wide rank": latent(q_rank=2048, q_norm=RMSNorm(d=2048)),
    "wide rank, no norm": latent(q_rank=2048, q_norm=None),
    "mostly turned": latent(d_nope=4, d_rope=128, d_value=4, positions=Rotary(d_rotary=128), q_rank=512, q_norm=None),
    "mostly plain": latent(d_nope=96, d_value=8, q_rank=1024, q_norm=None),
    "wide latents": latent(kv_rank=2048, kv_norm=None),
    "one head": latent(n_heads=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LATENTS)
def test_peak_bytes_of_latent_attention_is_the_peak(name: str, dtype: torch.dtype) -> None:
    """Of one text, so that no product copies its operands; the fused kernel has tiles of its own beside, 31 KB."""
    skip_repacked(dtype)
    spec = model(LATENTS[name])
    run = Pass(tokens=TOKENS, width=dtype.itemsize, logits="last")
    reference = memory(spec).peak_bytes(replace(run, kernel="reference"))
    assert reference == pytest.approx(peak(spec, "reference", batch=1, dtype=dtype), rel=0.01)
    fused = peak(spec, "fused", batch=1, dtype=dtype)
    assert fused - 40_000 <= memory(spec).peak_bytes(run) <= 1.01 * fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "body", [attention(softcap=3.0), attention(8, softcap=3.0), attention(positions=Alibi(n_heads=8))]
)
def test_peak_bytes_of_bent_and_sloped_scores_is_the_peak(body: Attention, dtype: torch.dtype) -> None:
    """256 x 256 scores of 8 heads: to be capped they are there three times, slopes first in float32."""
    spec = model(body)
    run = Pass(tokens=256, width=dtype.itemsize, logits="last")
    assert memory(spec).peak_bytes(run) == pytest.approx(
        peak(spec, "fused", batch=1, tokens=256, dtype=dtype), rel=0.01
    )


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 0.95), (torch.bfloat16, 0.99)])
@pytest.mark.parametrize("reach", [{"window": 32}, {"chunk": 32}])
def test_peak_bytes_of_a_mask_is_the_peak(reach: dict[str, Any], dtype: torch.dtype, least: float) -> None:
    """Made beside q, k and v, and widened by the library where it attends."""
    skip_repacked(dtype)
    spec = model(attention(**reach))
    run = Pass(tokens=256, width=dtype.itemsize, logits="last")
    assert least < memory(spec).peak_bytes(run) / peak(spec, "fused", batch=1, tokens=256, dtype=dtype) < 1.01


PATTERNS: list[dict[str, Any]] = [{"window": 5}, {"chunk": 5}, {"window": 5, "causal": False}]
PATTERNS += [{"positions": Alibi(n_heads=1), **more} for more in ({}, {"window": 5}, {"causal": False})]
PATTERNS += [{"positions": Alibi(n_heads=heads)} for heads in (2, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_room_to_make_a_mask_is_the_allocators_peak(pattern: dict[str, Any], dtype: torch.dtype) -> None:
    """Beside the positions (int64), but for a few numbers for each query: of one head it is mostly distances."""
    tokens = 40
    alibi = pattern.get("positions")
    heads = 1 if alibi is None else alibi.n_heads
    part = Attention(d_model=4, n_heads=heads, n_kv_heads=heads, d_head=4, **pattern)
    sees = AttentionPattern(causal=part.causal, window=part.window, chunk=part.chunk, alibi=alibi)

    def make() -> None:
        step = Step((1, tokens), torch.device("cpu"))
        mask(step, sees, dtype, lambda: step.key_positions_BT)

    with torch.inference_mode():
        make()
        found = measured.peak_bytes(make) - 8 * tokens
    _, kept, beside = AttentionMemory(part).mask_peak(Pass(tokens=tokens, width=dtype.itemsize))
    projected = 3 * tokens * heads * 4 * dtype.itemsize  # q, k and v, which are there by then
    assert found - 17 * tokens - 4 * heads <= kept + beside - projected <= found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"capacity": 16},
        {"bias": True},
        {"gating": "none", "activation": "gelu"},
        {"weighs": "inputs"},
        {"gating": ClampedGate(alpha=1.7, limit=7.0)},
        {"d_ff": 8},  # less than what is put back in order and added up
        {"d_ff": 8, "weighs": "inputs"},
        {"d_ff": 8, "gating": ClampedGate(alpha=1.7, limit=7.0)},
        {"d_ff": 8, "shared": GatedMLP(d_model=WIDTH, d_ff=1024, activation="silu"), "shared_gate": True},
    ],
)
def test_peak_bytes_of_experts_is_the_peak(more: dict[str, Any]) -> None:
    spec = model(mixture(**more))
    ratio = memory(spec).peak_bytes(Pass(tokens=TOKENS, batch=BATCH, width=4, logits="last")) / peak(spec, "fused")
    assert 0.95 < ratio < 1.02, ratio


def test_peak_bytes_of_a_capacity_is_the_peak() -> None:
    """The places taken at each expert, a byte and two counts of 8 for every choice, outweigh experts 8 wide."""
    router = Router(d_model=WIDTH, n_experts=256, top_k=4)
    part = mixture(router=router, n_experts=256, d_ff=8, capacity=16)
    spec = model(part)
    run = Pass(tokens=TOKENS, batch=BATCH, width=4, logits="last")
    assert memory(part).peak_bytes(run) > BATCH * TOKENS * 4 * 256 * 17
    assert 0.95 < memory(spec).peak_bytes(run) / peak(spec, "fused") < 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_of_experts_chosen_in_turn_is_the_peak(dtype: torch.dtype) -> None:
    """The logits of 4096 experts, a softmax and its input, and two masks outweigh the experts."""
    skip_repacked(dtype)
    router = Router(d_model=WIDTH, n_experts=4096, top_k=2, nearness=0.1)
    spec = model(mixture(router=router, n_experts=4096, d_ff=1))
    run = Pass(tokens=TOKENS, batch=BATCH, width=dtype.itemsize, logits="last")
    assert 0.95 < memory(spec).peak_bytes(run) / peak(spec, "fused", dtype=dtype) < 1.05


@pytest.mark.parametrize(
    "head",
    [
        Head(d_model=WIDTH, n_vocab=5000),
        Head(d_model=WIDTH, n_vocab=5000, bias=True),
        Head(d_model=WIDTH, n_vocab=5000, scale=0.5),
        Head(d_model=WIDTH, n_vocab=5000, softcap=3.0),
        Head(d_model=WIDTH, n_vocab=5000, shift=True),
        TiedHead(d_model=WIDTH, n_vocab=5000),
    ],
)
def test_peak_bytes_of_a_head_is_the_peak(head: Head | TiedHead) -> None:
    spec = model(MLP(d_model=WIDTH, d_ff=8, activation="relu"), 5000, head=head)
    run = Pass(tokens=TOKENS, batch=BATCH, width=4)
    assert memory(spec).peak_bytes(run) == pytest.approx(peak(spec, "fused", last=False), rel=0.03)


def test_peak_bytes_of_narrow_tables_is_the_peak() -> None:
    table = 4096
    spec = model(
        MLP(d_model=WIDTH, d_ff=8, activation="relu"),
        embedding=TokenEmbedding(n_vocab=50, d_model=WIDTH, d_table=table),
        head=TiedHead(d_model=WIDTH, n_vocab=50, d_table=table),
    )
    run = Pass(tokens=TOKENS, batch=BATCH, width=4)
    assert memory(spec).peak_bytes(run) == pytest.approx(peak(spec, "fused", last=False), rel=0.03)


# What selective checkpointing drops, from what each part keeps in its reference pass: the scores' size (Korthikanti et
# al. 2022, arXiv 2205.05198, section 5), and what follows number by number from what a product with a weight gave.
REMADE: list[tuple[Part, tuple[str, ...]]] = [
    (attention(positions=ROTARY), ("mask", "capped", "probabilities", "probabilities cast")),
    (latent(), ("mask", "probabilities", "probabilities cast")),
    (MLP(d_model=4, d_ff=8, activation="gelu"), ("hidden",)),
    (MLP(d_model=4, d_ff=8, activation="relu"), ()),
    (GatedMLP(d_model=4, d_ff=8, activation="silu"), ("activated", "hidden")),
    (GatedMLP(d_model=4, d_ff=8, activation="relu"), ("hidden",)),
    (mixture(), ("rows", "activated", "hidden")),
    (mixture(gating="none", activation="gelu"), ("rows", "hidden")),
    (mixture(gating="none", activation="relu"), ("rows",)),
    (mixture(activation="relu"), ("rows", "hidden")),
    (mixture(gating=ClampedGate(alpha=1.7, limit=7.0)), ("rows", "gate cut", "up cut", "opened", "hidden")),
    (Branch(name="x", body=MLP(d_model=4, d_ff=8, activation="gelu"), norm=RMSNorm(d=4)), ("body:input",)),
    (Branch(name="x", body=MLP(d_model=4, d_ff=8, activation="gelu")), ()),
    (RMSNorm(d=4), ()),
    (TokenEmbedding(n_vocab=5, d_model=4, d_table=2), ()),
    (Head(d_model=4, n_vocab=5, softcap=2.0), ()),
]


@pytest.mark.parametrize(
    ("part", "names"), REMADE, ids=[type(part).__name__ + str(i) for i, (part, _) in enumerate(REMADE)]
)
def test_what_can_be_made_again(part: Part, names: tuple[str, ...]) -> None:
    assert memory(part).recomputes() == names


def test_selective_checkpointing_of_a_block_in_bytes() -> None:
    """One block of a llama in bf16: b rows of s tokens, H heads of d, K for keys, M wide, F inside; reference kernel.

    Dropped: both norms' results (2 x 2bsM), the probabilities in float32 and cast to bf16, the mask (bool, s x s),
    silu's result and down's input (2 x 2bsF).
    """
    b, s, H, d, M, F = 3, 16, 4, 6, 10, 14
    own = Attention(d_model=M, n_heads=H, n_kv_heads=2, d_head=d, positions=Rotary(d_rotary=d))
    ffn = GatedMLP(d_model=M, d_ff=F, activation="silu")
    norm = RMSNorm(d=M)
    branches = (Branch(name="attention", body=own, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    spec = Model(
        embedding=TokenEmbedding(n_vocab=5, d_model=M),
        blocks=(Block(branches=branches),),
        head=Head(d_model=M, n_vocab=5),
        max_positions=16,
    )
    run = Pass(tokens=s, batch=b, width=2, kernel="reference")
    bill, kept = cost.saved(spec, run), cost.saved_tensors(spec, run)
    scores = b * H * s * s
    by_hand = 2 * 2 * b * s * M + 2 * 2 * b * s * F + scores * (4 + 2) + s * s
    dropped = {key: tensor.nbytes(2) for key, tensor in kept.items() if key in cost.recomputed_tensors(spec)}
    assert bill.all - bill.selective == sum(dropped.values()) == by_hand, dropped
    fused = cost.saved(spec, Pass(tokens=s, batch=b, width=2))
    assert fused.all - fused.selective == 2 * 2 * b * s * M + 2 * 2 * b * s * F


def test_turning_and_norming_commute_only_without_gains() -> None:
    assert [order_matters(norm) for norm in (None, *OF_HEAD.values())] == [False, True, True, False]
    assert order_matters(RMSNorm(d=4, gain="offset"))


def test_yarn_with_an_empty_ramp_steps_within_a_thousandth() -> None:
    """Both bounds on one pair: below it nothing is stretched, from it on everything, as 0.001 stands for no width."""
    scaling = YaRN(factor=4.0, original_context=64, beta_fast=1.0, beta_slow=1.0)
    rotary, plain = Rotary(d_rotary=16, theta=100.0, scaling=scaling), Rotary(d_rotary=16, theta=100.0)
    ratios = [a / b for a, b in zip(rotary.inverse_frequencies(), plain.inverse_frequencies(), strict=True)]
    # the pair whose wavelength is the context: d ln(64 / 2 pi) / (2 ln 100) = 4.03, down to 4 and up to 5
    assert ratios[:5] == pytest.approx([1.0] * 5)
    assert ratios[6:] == pytest.approx([0.25] * 2)


def test_a_context_beyond_the_table_of_positions_is_refused() -> None:
    table = LearnedPositions(n_positions=16, d_model=WIDTH)
    ffn = MLP(d_model=WIDTH, d_ff=8, activation="relu")
    assert model(ffn, positions=table, max_positions=16).max_positions == 16
    with pytest.raises(InputError, match=r"Model\.max_positions.*16 positions"):
        model(ffn, positions=table, max_positions=17)


@pytest.mark.parametrize("tokens", [16, 40, 64, 100, 180, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "d_head", "d_model"), [(1, 1, 8, 32), (2, 4, 8, 64), (1, 4, 64, 256), (2, 2, 32, 16)]
)
def test_peak_bytes_of_linear_attention(tokens: int, batch: int, heads: int, d_head: int, d_model: int) -> None:
    """Within a tenth of the allocator's peak, in one chunk and in several, with a cache; 64 tokens are a chunk."""
    part = LinearAttention(d_model=d_model, n_heads=heads, d_head=d_head)
    built = module(part, "")
    for parameter in built.parameters():
        parameter.data.normal_(0.0, 0.05)
    x = torch.randn(batch, tokens, d_model)
    cache = Cache(part, batch=batch, capacity=tokens, dtype=torch.float32)

    def run() -> None:
        built(x, Step((batch, tokens), x.device, cache=cache))

    with torch.inference_mode():
        run()
        peak = measured.peak_bytes(run)
    assert 0.9 * peak <= memory(part).peak_bytes(Pass(tokens=tokens, batch=batch, width=4)) <= 1.1 * peak
