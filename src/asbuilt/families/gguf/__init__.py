"""GGUF files of the families: `general.architecture` to a family's config, and its tensors under llama.cpp's names."""

from asbuilt.families.gguf.architectures import ARCHITECTURES
from asbuilt.families.gguf.engine import Architecture, Written, read, write
from asbuilt.families.gguf.tables import table

__all__ = ["ARCHITECTURES", "Architecture", "Written", "read", "table", "write"]
