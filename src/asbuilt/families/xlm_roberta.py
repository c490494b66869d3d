"""The xlm-roberta family: roberta of a hundred languages; bge-m3 and the multilingual E5 are published under it.

Conneau et al. 2019 (arXiv 1911.02116). Names on disk are roberta's.
"""

from __future__ import annotations

from asbuilt.families.roberta import family

FAMILY = family("xlm-roberta", "XLMRoberta", 30522)  # as in transformers' XLMRobertaConfig
