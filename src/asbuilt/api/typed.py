"""The packages that can be called, `asbuilt.measure`, `plan` and `train`, for a type checker. Never imported."""

from __future__ import annotations

from typing import Literal, overload

from asbuilt.api.measure import measure as measure_given
from asbuilt.api.train import train as train_given
from asbuilt.catalog.machine import Machine
from asbuilt.checkpoint.given import Given
from asbuilt.measure import calibrate, counted, this_machine
from asbuilt.measure import measure as measure_built
from asbuilt.plan import Conventions, Options, ServePlan, TrainPlan, serve
from asbuilt.plan import train as plan_train


class Measure:
    """`asbuilt.measure` for a type checker."""

    __call__ = staticmethod(measure_given)
    measure = staticmethod(measure_built)
    calibrate, counted = staticmethod(calibrate), staticmethod(counted)
    this_machine = staticmethod(this_machine)


class Plan:
    """`asbuilt.plan` for a type checker."""

    serve, train = staticmethod(serve), staticmethod(plan_train)
    Conventions, Options = Conventions, Options

    @overload
    def __call__(
        self, model: Given, gpu: Machine | str, *, task: Literal["serve"] = ..., **more: object
    ) -> ServePlan: ...

    @overload
    def __call__(self, model: Given, gpu: Machine | str, *, task: Literal["train"], **more: object) -> TrainPlan: ...

    def __call__(self, model: Given, gpu: Machine | str, **more: object) -> ServePlan | TrainPlan:
        """As `asbuilt.api.plan` has it."""
        raise NotImplementedError


class Train:
    """`asbuilt.train` for a type checker."""

    __call__ = staticmethod(train_given)


measure, plan, train = Measure(), Plan(), Train()
