"""The mbart family: bart with a norm before each branch and a last one. Liu et al. 2020 (arXiv 2001.08210)."""

from __future__ import annotations

from asbuilt.families.bart import Kin, family

FAMILY = family("mbart", "MBartForConditionalGeneration", Kin(norm_first=True, embedding_norm=True), n_vocab=50265)
