"""A small model of texts that read an image cut into tiles by cross-attention."""

from __future__ import annotations

from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    CrossAttention,
    GatedMLP,
    Head,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    RMSNorm,
    Rotary,
    TiledVision,
    TileEmbedding,
    TilePatches,
    TilePositions,
    TokenEmbedding,
    VisionLanguageModel,
)

PLACE = 21
TILINGS = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))


def tower(n_tiles: int = 3, tilings: tuple[tuple[int, int], ...] = TILINGS, multiple: int = 4) -> ImageEncoder:
    """A tower of two blocks and a gated one, before which vectors of tiles are added to the normed stream."""
    norm = LayerNorm(d=6)
    tiles = TileEmbedding(d_model=6, n_tilings=len(tilings), n_tiles=n_tiles)
    places = TilePositions(d_model=6, n_positions=5, n_tilings=len(tilings), n_tiles=n_tiles)
    patches = TilePatches(
        image_size=4,
        patch_size=2,
        channels=2,
        d_model=6,
        class_token="first",
        tilings=tilings,
        n_tiles=n_tiles,
        multiple=multiple,
        tiles=tiles,
        positions=places,
        norm=norm,
    )
    attention = Attention(d_model=6, n_heads=2, n_kv_heads=2, d_head=3, causal=False, cached=False)
    bodies = {"attention": attention, "ffn": MLP(d_model=6, d_ff=7, activation="gelu", bias=True)}
    plain = tuple(Branch(name=name, norm=norm, body=body) for name, body in bodies.items())
    gated = tuple(Branch(name=name, norm=norm, body=body, gated=True) for name, body in bodies.items())
    middle = Branch(name="tiles", norm=norm, normed=True, body=tiles)
    return ImageEncoder(
        embedding=patches,
        blocks=(Block(branches=plain), Block(branches=plain), Block(branches=(middle, *gated))),
        head=None,
        max_positions=patches.n_tokens,
    )


def tiled_seer(**more: object) -> VisionLanguageModel:
    """The model: attention, cross-attention, attention; `more` is of its tower."""
    made = tower(**more)  # type: ignore[arg-type]
    embedding = made.embedding
    assert isinstance(embedding, TilePatches)
    attention = Attention(d_model=8, n_heads=2, n_kv_heads=1, d_head=4, positions=Rotary(d_rotary=4, theta=10.0))
    cross = CrossAttention(
        d_model=8,
        d_source=8,
        n_heads=4,
        n_kv_heads=2,
        d_head=3,
        q_norm=RMSNorm(d=3),
        k_norm=RMSNorm(d=3),
        n_source=embedding.n_tiles * embedding.n_places,
    )
    ffn, norm = GatedMLP(d_model=8, d_ff=10, activation="silu"), RMSNorm(d=8)
    own = Block(branches=(Branch(name="attention", norm=norm, body=attention), Branch(name="ffn", norm=norm, body=ffn)))
    across = Block(
        branches=(
            Branch(name="cross", norm=norm, body=cross, gated=True),
            Branch(name="ffn", norm=norm, body=ffn, gated=True, after_source=True),
        )
    )
    text = LanguageModel(
        embedding=TokenEmbedding(n_vocab=20, d_model=8, extra=3),
        blocks=(own, across, own),
        norm=norm,
        head=Head(d_model=8, n_vocab=20),
        d_source=8,
        max_positions=64,
    )
    projector = MLPProjector(widths=(18, 8), activation="gelu", bias=True)
    vision = TiledVision(tower=made, projector=projector, placeholder=PLACE, taps=(1, 0))
    return VisionLanguageModel.of(text, vision)
