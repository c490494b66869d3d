"""muP: activations keep their size from width to width, and the scales are the table's."""

from __future__ import annotations

import math
import random

import pytest
import torch
from small_runs import recipe as small_recipe
from torch import Tensor

from asbuilt import InputError, build, decoder
from asbuilt.nn.build import initialise
from asbuilt.spec import LanguageModel
from asbuilt.train.batch import Batch
from asbuilt.train.loop import prepare
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Optimizer
from asbuilt.train.step import train_step
from asbuilt.train.width import scales

BASE, WIDTHS = 32, (32, 128, 512)


def wide(width: int, *, tied: bool = False) -> LanguageModel:
    return decoder(d_model=width, n_layers=2, n_heads=width // 16, n_vocab=61, tied=tied)


def moved(width: int, base: int) -> float:
    """The root mean square by which the logits move in four steps, of AdamW."""
    model = build(wide(width), seed=None)
    initialise(model, 5, 0.1, {path: one.std for path, one in scales(model.spec, base).items()})
    ids = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(3))
    batch = Batch(ids=ids, targets=ids.roll(-1, 1))
    made = optimizers(model, Optimizer(lr=0.01, weight_decay=0.0), base)

    def logits() -> Tensor:
        return model(ids).detach()

    before = logits()
    for _ in range(4):
        train_step(model, [batch], made)
    return float((logits() - before).square().mean().sqrt())


def test_what_training_moves_is_flat_over_widths_and_grows_without() -> None:
    with_mup = [moved(width, BASE) for width in WIDTHS]
    without = [moved(width, 0) for width in WIDTHS]
    assert with_mup[0] == pytest.approx(without[0], rel=1e-5)  # at the base width both are one
    assert max(with_mup) < 2 * min(with_mup), with_mup
    assert without[-1] > 2.5 * without[0], without


def test_every_weight_has_the_scales_of_its_kind() -> None:
    ratio = random.choice([2, 4, 8])
    spec = wide(BASE * ratio)
    std = random.uniform(0.05, 0.5)
    model = build(spec, seed=None)
    found = scales(spec, BASE)
    initialise(model, random.randrange(2**31), std, {path: one.std for path, one in found.items()})
    groups = {
        id(p): g for o, _ in optimizers(model, Optimizer(), BASE).made for g in o.param_groups for p in g["params"]
    }
    for path, p in model.named_parameters():
        if "norm" in path or path.startswith("embedding"):
            expected, rate = std, 1.0
        elif path.startswith("head"):
            expected, rate = std / ratio, 1 / ratio
        else:
            deep = 2.0 if path.endswith(("o.weight", "down.weight")) else 1.0  # sqrt(2 layers) of those that write
            expected, rate = std / math.sqrt(ratio) / deep, 1 / ratio
        assert groups[id(p)]["scale"] == pytest.approx(rate)
        decay = 0.0 if "norm" in path or path.startswith("embedding") else 0.1
        assert groups[id(p)]["weight_decay"] * groups[id(p)]["scale"] == pytest.approx(decay)
        if "norm" not in path:
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.1), path


def test_what_cannot_be_scaled_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match=r"model\.base_width"):
        scales(wide(64, tied=True), 32)
    with pytest.raises(InputError, match=r"optimizer\.name"):
        optimizers(build(wide(64)), Optimizer(name="muon"), 32)


def test_a_recipe_with_a_base_width_has_both(tmp_path: object) -> None:
    made = prepare(small_recipe(tmp_path, "r", "model.base_width=4", "model.config.tie_word_embeddings=false"))  # type: ignore[arg-type]
    scaled = {group["scale"] for one, _ in made.optimizer.made for group in one.param_groups}
    assert scaled == {1.0, 0.25}
    head = made.model.get_parameter("head.weight")
    assert float(head.detach().std()) == pytest.approx(made.recipe.model.std / 4, rel=0.25)
