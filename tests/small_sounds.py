"""A small model of texts with sounds in them: attention over both, two vectors of a sound to each token."""

from __future__ import annotations

from asbuilt.spec import (
    MLP,
    Attention,
    AudioEncoder,
    AudioLanguageModel,
    Block,
    Branch,
    Head,
    Hearing,
    LanguageModel,
    MelEmbedding,
    MLPProjector,
    Rotary,
    TokenEmbedding,
)


def block(d_model: int, causal: bool) -> Block:
    """A block of attention and a feed-forward, without norms."""
    positions = Rotary(d_rotary=4)
    mixer = Attention(d_model=d_model, n_heads=2, n_kv_heads=1, d_head=4, positions=positions, causal=causal)
    ffn = MLP(d_model=d_model, d_ff=8, activation="gelu")
    return Block(branches=(Branch(name="attention", body=mixer), Branch(name="ffn", body=ffn)))


TEXT = LanguageModel(
    embedding=TokenEmbedding(n_vocab=9, d_model=6),
    blocks=(block(6, True),),
    head=Head(d_model=6, n_vocab=9),
    max_positions=24,
)
TOWER = AudioEncoder(
    embedding=MelEmbedding(n_mels=3, n_tokens=4, d_model=5), blocks=(block(5, False),), max_positions=4
)
PROJECTOR = MLPProjector(widths=(10, 7, 6), activation="gelu", stack=2)
HEARING = Hearing(tower=TOWER, projector=PROJECTOR, placeholder=1)
HEARER = AudioLanguageModel.of(TEXT, HEARING)
