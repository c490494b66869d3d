"""MIG slices: shares of memory, bandwidth and rates, names as people and tools write them, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asbuilt import InputError
from asbuilt.catalog import machines, slices
from asbuilt.plan import serve
from asbuilt.plan.train.options import Options
from asbuilt.plan.train.plan import plan as plan_train
from asbuilt.plan.train.subject import Subject

# As NVIDIA's guide prints them: card, profile, how many fit on a card, gigabytes.
PUBLISHED = [
    ("a100-40gb", "1g.5gb", 7),
    ("a100-40gb", "3g.20gb", 2),
    ("a100-80gb", "2g.20gb", 3),
    ("h100-sxm", "1g.10gb", 7),
    ("h100-sxm", "1g.20gb", 4),
    ("h100-pcie", "4g.40gb", 1),
    ("h200", "1g.18gb", 7),
    ("h200", "1g.35gb", 4),
    ("h200", "2g.35gb", 3),
    ("h200", "3g.71gb", 2),
    ("b200", "1g.23gb", 7),
    ("b200", "1g.45gb", 4),
    ("b200", "3g.90gb", 2),
    ("b200", "7g.180gb", 1),
]


@pytest.mark.parametrize(("card", "profile", "many"), PUBLISHED)
def test_published_profiles(card: str, profile: str, many: int) -> None:
    """As many as are published fit on a card, and not one more; the gigabytes are those of the name."""
    whole, part = machines.resolve(card), machines.resolve(f"{card}-{profile}")
    assert part.memory_gb == float(profile.partition(".")[2][:-2])
    share, rate = part.bandwidth / whole.bandwidth, part.rates["bf16"] / whole.rates["bf16"]
    assert rate == pytest.approx(int(profile[0]) / 7)
    most = min(int(1 / share + 1e-9), int(1 / rate + 1e-9))
    assert most == many
    assert part.process_gib is not None
    assert whole.process_gib is not None
    assert part.process_gib == pytest.approx(share * whole.process_gib)
    assert part.memory_gb == pytest.approx(share * whole.memory_gb, rel=0.03)
    assert (part.link, part.slice_of) == (None, card)
    assert "Multi-Instance GPU User Guide" in part.source


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("h100-3g.40gb", "h100-sxm-3g.40gb"),
        ("a100-3g.40gb", "a100-80gb-3g.40gb"),
        ("a100-3g.20gb", "a100-40gb-3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100-sxm-3g.40gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb-1g.5gb"),
        ("H200 MIG 3g.71gb", "h200-3g.71gb"),
    ],
)
def test_names(said: str, name: str) -> None:
    assert machines.resolve(said).name == name
    assert machines.resolve(f"{said},bf16=100T").rates["bf16"] == 1e14


@pytest.mark.parametrize("said", ["h100-5g.40gb", "h100-3g.20gb", "l40s-1g.6gb", "h300-1g.10gb", "h100-1g.10gb-1g.5gb"])
def test_unknown_profiles_are_refused(said: str) -> None:
    with pytest.raises(InputError) as error:
        machines.resolve(said)
    assert error.value.field == "gpu"


def test_a_model_is_not_divided_over_slices() -> None:
    wrong: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "gpus": 4}]
    for degrees in wrong:
        with pytest.raises(InputError, match="is a MIG slice"):
            serve("llama-3-8b", "h100-3g.40gb", **degrees)
    with pytest.raises(InputError, match="MIG slice"):
        plan_train(Subject(parameters=1e9), machines.resolve("h100-3g.40gb"), Options(gpus=2))
    copies = random.randint(2, 7)
    one, many = (serve("llama-3-8b", "h100-3g.40gb", gpus=gpus) for gpus in (1, copies))
    assert many.layout.copies == copies
    assert (one.users or 0) * copies == many.users
    assert serve("llama-3-70b", "h100-7g.80gb", users=1).smallest_count is None
    assert {found.layout.per_copy for found in serve("llama-3-8b", "h100-3g.40gb", users=40).layouts} == {1}


def test_the_plan_of_a_slice_is_that_of_its_numbers() -> None:
    numbers = "memory=40GB,process=39.595GiB,bandwidth=1.675TB/s,bf16=424.028571428T"
    part, same = serve("llama-3-8b", "h100-sxm-3g.40gb"), serve("llama-3-8b", numbers)
    assert part.users == same.users
    assert part.expected["middle"] == pytest.approx(same.expected["middle"])
    assert len(slices.profiles("h100-sxm")) == 6
