"""A small network of convolutions over images, one part of each kind of it by name, and tokens of images."""

from __future__ import annotations

from asbuilt.spec import (
    ConvolvedPatches,
    GridAttention,
    GridConvolution,
    InvertedResidual,
    OwnTokens,
    Part,
    PixelConvolution,
    RMSNorm,
)

STEM = PixelConvolution(d_in=3, d_out=5, kernel=3, stride=2, norm=RMSNorm(d=5))
APART = GridConvolution(d_in=5, d_out=5, kernel=3, stride=2, apart=True, norm=RMSNorm(d=5))
RESIDUAL = InvertedResidual(
    steps=(APART, GridConvolution(d_in=5, d_out=7, kernel=1, norm=RMSNorm(d=7), activated=True)), scaled=True
)
REDUCED = GridConvolution(d_in=7, d_out=7, kernel=3, stride=2, apart=True, norm=RMSNorm(d=7))
MULTI = GridAttention(d_model=7, n_heads=3, d_head=2, norm=RMSNorm(d=7), k_reduced=REDUCED, v_reduced=REDUCED)
LATER = InvertedResidual(steps=(GridConvolution(d_in=7, d_out=4, kernel=3, stride=2, norm=RMSNorm(d=4)),))
NETWORK = ConvolvedPatches(
    image_size=16,
    patch_size=8,
    d_model=11,
    stem=STEM,
    blocks=(RESIDUAL, MULTI, LATER),
    fused=1,
    fuse=InvertedResidual(steps=(GridConvolution(d_in=11, d_out=11, kernel=1, norm=RMSNorm(d=11)),)),
    norm=RMSNorm(d=11),
)
OWN = OwnTokens(through="vision", first=3, n_rows=2, d_table=11, d_model=6, norm=RMSNorm(d=11))
SMALL: tuple[Part, ...] = (STEM, APART, RESIDUAL, MULTI, NETWORK, OWN)
