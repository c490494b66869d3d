"""FLOPs of published models at their full size, against PyTorch's counter on the meta device.

Each layer that differs from the others is built and counted at its full size, and once for all equal to it. The
text is short: how scores grow with it is held to the counter on drawn specs. Experts are multiplied one by one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from asbuilt import cost
from asbuilt.families import FAMILIES, load_config_file, read_config
from asbuilt.measure import run as measured
from asbuilt.spec import Model, Pass, walk

MODELS = Path(__file__).parents[3] / "shared" / "models"
TOKENS = 3


def published() -> list[Path]:
    """The published configs whose family is read."""
    named = [(path, json.loads(path.read_text())) for path in sorted(MODELS.glob("*.json"))]
    return [path for path, said in named if isinstance(said, dict) and said.get("model_type") in FAMILIES]


def counted(spec: Model) -> int:
    """FLOPs of one pass, from a count of each kind of layer: what a second copy of it adds."""

    def of(*blocks: int) -> int:
        return measured.flops(replace(spec, blocks=tuple(spec.blocks[i] for i in blocks)), TOKENS)

    kinds = Counter(spec.blocks)
    firsts = {block: spec.blocks.index(block) for block in kinds}
    alone = {block: of(i) for block, i in firsts.items()}
    first = spec.blocks[0]
    outside = 2 * alone[first] - of(0, 0)
    return outside + sum(n * (alone[block] - outside) for block, n in kinds.items())


@pytest.mark.parametrize("path", published() or [None], ids=lambda path: path.stem if path else "absent")
def test_counter_agrees_at_full_size(path: Path | None) -> None:
    if path is None:
        pytest.skip(f"no published models at {MODELS}")
    spec = read_config(load_config_file(path), path.stem).spec
    if spec.head is None:
        pytest.skip("no logits: counted on drawn specs")
    # an encoder's layers come with every count, and shared weights with their first use: such models are counted whole
    whole = "source" in spec.reads or any(part.borrows is not None for _, part in walk(spec))
    found = measured.flops(spec, TOKENS) if whole else counted(spec)
    assert found == cost.flops(spec, Pass(tokens=TOKENS)).forward
