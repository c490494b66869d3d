"""The marian family: encoder and decoder as of 2017, with computed sinusoids and LayerNorm on each sum.

Vaswani et al. 2017 (arXiv 1706.03762); Junczys-Dowmunt et al. 2018 (arXiv 1804.00344). Files of transformers before 5
store the sinusoids too, which are passed over.
"""

from __future__ import annotations

from asbuilt.families.bart import Kin, family

FAMILY = family("marian", "MarianMTModel", Kin(sinusoids=True, two_vocabularies=True), n_vocab=58101, start=58100)
