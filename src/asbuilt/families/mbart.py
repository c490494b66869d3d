"""The mbart family: bart with a norm before each branch and a last one. Liu et al. 2020 (arXiv 2001.08210)."""

from __future__ import annotations

from asbuilt.families.bart import BIG, Kin

KIN = Kin(
    family="mbart",
    heads=("MBartForConditionalGeneration",),
    defaults={**BIG, "vocab_size": 50265},
    norm_first=True,
    embedding_norm=True,
)
read, write, table = KIN.read, KIN.write, KIN.table
