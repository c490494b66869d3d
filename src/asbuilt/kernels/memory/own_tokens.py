"""What token ids of images or sounds save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.own_tokens import OwnTokens
from asbuilt.spec.part import Pass


@memory_of(OwnTokens)
class OwnTokensMemory(Memory[OwnTokens]):
    """Memory of a lookup, a map, its norm, and a choice between the result and the text's rows."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Which rows are looked up and which tokens are own, the map's input, and what its norm keeps."""
        part = self.part
        return (
            Saved(name="rows", size=run.rows, width="int64"),
            Saved(name="own", size=run.rows, width="bool"),
            Saved(name="mapped", size=run.rows * part.d_table),
            Saved(name="projected", size=run.rows * part.d_model),
            Saved(name="rstd", size=run.rows, width="wide"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """Beside the text's rows: the looked-up ones and their norm, or their map and its norm, or the choice."""
        part = self.part
        rows, made = run.rows * part.d_table * run.width, run.rows * part.d_model * run.width
        return made + max(rows + memory(part.norm).peak_bytes(run), rows + made, 3 * made) + 16 * run.rows
