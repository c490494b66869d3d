"""A small model of texts with images of any size: patches, windows, interpolated positions, sections, taps."""

from __future__ import annotations

from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    GridPatches,
    GridPositions,
    GridVision,
    Head,
    ImageEncoder,
    LanguageModel,
    MLPProjector,
    Plane,
    RMSNorm,
    Rotary,
    Sections,
    TokenEmbedding,
    VisionLanguageModel,
    Windowed,
)

PLACE = 3
TURNS = Sections(pairs=(2, 1, 1), interleaved=True)


def block(d_model: int, mixer: Attention | Windowed) -> Block:
    """A block of RMSNorm, this mixer and a gated feed-forward."""
    ffn = GatedMLP(d_model=d_model, d_ff=8, activation="silu")
    attention = Branch(name="attention", body=mixer, norm=RMSNorm(d=d_model))
    return Block(branches=(attention, Branch(name="ffn", body=ffn, norm=RMSNorm(d=d_model))))


def seer(axes: Sections | None = TURNS) -> VisionLanguageModel:
    """The model, whose text has these sections."""
    attention = Attention(
        d_model=16, n_heads=2, n_kv_heads=1, d_head=8, positions=Rotary(d_rotary=8, theta=10.0, axes=axes)
    )
    text = LanguageModel(
        embedding=TokenEmbedding(n_vocab=20, d_model=16),
        blocks=(block(16, attention),) * 2,
        head=Head(d_model=16, n_vocab=20),
        max_positions=64,
    )
    plane = Rotary(d_rotary=4, theta=10.0, axes=Plane())
    inner = Attention(d_model=8, n_heads=2, n_kv_heads=2, d_head=4, causal=False, cached=False, positions=plane)
    tower = ImageEncoder(
        embedding=GridPatches(image_size=16, patch_size=2, frames=2, d_model=8),
        positions=GridPositions(n_side=3, d_model=8),
        blocks=(block(8, Windowed(d_model=8, attention=inner, side=4)), block(8, inner)),
        max_positions=64,
    )
    merger = MLPProjector(widths=(32, 16), activation="gelu", merge=2, norm=RMSNorm(d=32))
    projector = MLPProjector(widths=(32, 16, 16), activation="gelu", merge=2, norm=RMSNorm(d=8))
    vision = GridVision(tower=tower, projector=projector, placeholder=PLACE, taps=(0,), mergers=(merger,))
    return VisionLanguageModel.of(text, vision)
