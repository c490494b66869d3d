"""Parts whose sizes are small primes, which several tests work out by hand, and a model of them."""

from __future__ import annotations

from typing import Any

from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    CrossAttention,
    DeltaTimeMixing,
    FusedPredictor,
    GatedDeltaNet,
    GatedMLP,
    Head,
    HeadNorm,
    ImageEncoder,
    LanguageModel,
    LatentAttention,
    MixtureOfExperts,
    PatchEmbedding,
    RMSNorm,
    Router,
    ShortConvolution,
    TokenEmbedding,
    TokenShift,
)

ATTENTION = Attention(d_model=11, n_heads=6, n_kv_heads=2, d_head=5)
LATENT = LatentAttention(d_model=2, n_heads=3, kv_rank=7, d_nope=2, d_rope=5, d_value=3)
CROSS = CrossAttention(d_model=11, d_source=13, n_heads=3, d_head=5)
DELTA_NET = GatedDeltaNet(
    d_model=11,
    n_key_heads=2,
    n_value_heads=6,
    d_key=3,
    d_value=5,
    conv=ShortConvolution(channels=42, kernel=4),
    norm=RMSNorm(d=5),
)
DELTA_TIME = DeltaTimeMixing(
    d_model=11,
    n_heads=2,
    d_key=3,
    d_value=5,
    shift=TokenShift(d_model=11, targets=("r", "decay", "k", "v", "rate", "gate")),
    norm=HeadNorm(d=5, n_heads=2),
    decay_rank=4,
    rate_rank=6,
    gate_rank=7,
)
FUSED = FusedPredictor(
    embedding=TokenEmbedding(n_vocab=17, d_model=11),
    d_target=7,
    token_norm=RMSNorm(d=11),
    stream_norm=RMSNorm(d=11),
    attention=Attention(d_model=11, d_input=22, n_heads=6, n_kv_heads=2, d_head=5),
    ffn_norm=RMSNorm(d=11),
    ffn=GatedMLP(d_model=11, d_ff=13, activation="silu"),
    norm=RMSNorm(d=11),
    head=Head(d_model=11, n_vocab=3),
)
ROUTER = Router(d_model=5, n_experts=8, top_k=3)
EXPERTS = MixtureOfExperts(d_model=5, d_ff=13, n_experts=8, activation="silu", router=ROUTER)
BODY = GatedMLP(d_model=11, d_ff=13, activation="silu")
FFN = Block(branches=(Branch(name="ffn", body=BODY),))
MODEL = LanguageModel(
    embedding=TokenEmbedding(n_vocab=5, d_model=11),
    blocks=(FFN,),
    head=Head(d_model=11, n_vocab=5),
    max_positions=16,
)


def tower(d_ff: int, **more: Any) -> ImageEncoder:  # noqa: ANN401  any field
    body = GatedMLP(d_model=7, d_ff=d_ff, activation="silu")
    return ImageEncoder(
        embedding=PatchEmbedding(image_size=4, patch_size=2, d_model=7, class_token="first"),
        blocks=(Block(branches=(Branch(name="ffn", body=body),)),) * 2,
        max_positions=5,
        **more,
    )
