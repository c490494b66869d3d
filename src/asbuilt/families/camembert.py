"""The camembert family: roberta of French texts. Martin et al. 2019 (arXiv 1911.03894); names on disk are roberta's."""

from __future__ import annotations

from asbuilt.families.roberta import family

FAMILY = family("camembert", "Camembert", 30522)  # as in transformers' CamembertConfig
