"""The mllama_text_model family: mllama's text alone, whose layers that read an image are held, and passed over.

Llama 3.2 Vision; Dubey et al. 2024, Llama 3 (arXiv 2407.21783), section 7. As `MllamaForCausalLM` stores it.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import mllama
from asbuilt.families.shared.ends import End

FAMILY = replace(mllama.TEXT, ends=lambda name: {f"{name}TextModel": End()})
