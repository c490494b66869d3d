"""What a deployment costs: by the hour, and by the million tokens that it reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asbuilt.errors import InputError
from asbuilt.plan.serve.workload import Served

HOUR, MILLION = 3600, 10**6
LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device for an hour, in a currency that is repeated as it was given."""

    amount: float
    currency: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amount) and 0 < self.amount <= LARGEST):
            raise InputError(field="price", value=self.amount, allowed=f"above 0 and at most {LARGEST:,.0f} an hour")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price of all devices for an hour, and of a million tokens of prompts, of answers, and of both.

    Hours are divided between prompts and answers by the time that they take. None where nothing is served.
    """

    hour: float
    million_input: float | None
    million_output: float | None
    million_tokens: float | None


def of_workload(price: Price, gpus: int, served: Served) -> Cost:
    """Returns the cost of a simulated workload: idle time is paid too."""
    hour, share = price.amount * gpus, served.prefill_share
    both = served.input_tokens_per_second + served.output_tokens_per_second
    return Cost(
        hour=hour,
        million_input=_million(hour * share, served.input_tokens_per_second),
        million_output=_million(hour * (1 - share), served.output_tokens_per_second),
        million_tokens=_million(hour, both),
    )


def of_rates(
    price: Price, gpus: int, inputs: float, outputs: float | None, pools: tuple[int, int] | None = None
) -> Cost:
    """Returns the cost of devices that only read prompts, or only write answers, at these tokens/s.

    `pools` are how many of them do the one and the other, None if all do either.
    """
    read, write = (price.amount * many for many in pools or (gpus, gpus))
    written = None if outputs is None else _million(write, outputs)
    million = _million(read, inputs)
    return Cost(hour=price.amount * gpus, million_input=million, million_output=written, million_tokens=None)


def _million(hour: float, per_second: float) -> float | None:
    return hour / HOUR / per_second * MILLION if per_second > 0 else None
