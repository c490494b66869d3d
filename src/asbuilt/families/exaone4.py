"""The exaone4 family: norms after each branch and over each head; where some layers have windows, the others no RoPE.

LG AI Research 2025 (arXiv 2507.11407).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.olmo2 import EPS
from asbuilt.families.shared.key import Values
from asbuilt.families.shared.names import ATTENTION, GATED, POST_NORMS, QK_NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import LayerWindows, every_but_last, sizes


class _Hybrid(LayerWindows):
    """Windows of the layers that `layer_types` says, else of all but the last of each `sliding_window_pattern`.

    A null `sliding_window` gives every layer full attention and RoPE; beside one full attention has no RoPE.
    """

    pattern = "sliding_window_pattern"

    def __init__(self) -> None:
        super().__init__(default=4096, usual=self._by_pattern)

    def _by_pattern(self, reader: ConfigReader, values: Values) -> tuple[bool, ...]:
        """Returns the layers that a number or a text such as LLLG (local, local, local, global) gives a window."""
        said: Any = reader.config.get(self.pattern, 4)
        n_layers = values["n_layers"]
        reader.irrelevant(self.pattern, "layer_types, as it is written, says it")
        if isinstance(said, str) and said and set(said) <= {*"LG"}:
            return tuple(said[i % len(said)] == "L" for i in range(n_layers))
        needed = reader.config.get("sliding_window", 4096) is not None and not reader.given("layer_types")
        reader.require(
            self.pattern,
            not needed or (is_whole(said) and int(said) > 0),
            "a whole number above 0, or a text of L and G",
        )
        return every_but_last(n_layers, int(said)) if needed else (False,) * n_layers

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows, and which layers have RoPE."""
        super().read(reader, values)
        whole = reader.config.get(self.key, self.default) is None
        reader.irrelevant(self.key, "carried, since one that no layer has leaves them without RoPE")
        values["rope_layers"] = tuple(whole or one is not None for one in values["windows"])

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; without a window null where layers have RoPE."""
        written = super().write(parts)
        if any(layer.window is not None for layer in parts.attentions):
            return written
        turned = parts.attention.positions is not None
        return written | {self.key: None if turned else parts.carried.get(self.key) or self.default}


FAMILY = replace(
    llama.FAMILY,
    name="exaone4",
    heads=("Exaone4ForCausalLM",),
    keys=(  # defaults as in transformers' Exaone4Config
        *sizes(n_vocab=102400, d_model=4096, d_ff=16384, n_layers=32, n_heads=32, n_kv_heads=32, context=2048),
        EPS,
        _Hybrid(),
    ),
    build=partial(llama.build, norm_at="after", head_norms=True),
    names=Names(stems=POST_NORMS | ATTENTION | GATED | QK_NORMS),
)
