"""Packages that can also be called: `asbuilt.plan(model, gpu=...)` beside `asbuilt.plan.serve`.

A call runs the function of the same name in `asbuilt.api`, which is imported on the first call; the packages do not
depend on it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from asbuilt.api.measure import measure as measure_given
    from asbuilt.catalog.machine import Machine
    from asbuilt.checkpoint.given import Given
    from asbuilt.measure import calibrate, counted, this_machine
    from asbuilt.measure import measure as measure_built
    from asbuilt.plan import Conventions, Options, ServePlan, TrainPlan, serve, train

    class Measure:
        """`asbuilt.measure` for a type checker."""

        __call__ = staticmethod(measure_given)
        measure = staticmethod(measure_built)
        calibrate, counted = staticmethod(calibrate), staticmethod(counted)
        this_machine = staticmethod(this_machine)

    class Plan:
        """`asbuilt.plan` for a type checker."""

        serve, train = staticmethod(serve), staticmethod(train)
        Conventions, Options = Conventions, Options

        @overload
        def __call__(
            self, model: Given, gpu: Machine | str, *, task: Literal["serve"] = ..., **more: object
        ) -> ServePlan: ...

        @overload
        def __call__(
            self, model: Given, gpu: Machine | str, *, task: Literal["train"], **more: object
        ) -> TrainPlan: ...

        def __call__(self, model: Given, gpu: Machine | str, **more: object) -> ServePlan | TrainPlan:
            """See `asbuilt.api.plan`."""
            ...

    measure, plan = Measure(), Plan()


class CallablePackage(ModuleType):
    """A package that is called as the function of the same name in `asbuilt.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as the function declares
        """Calls the function."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"asbuilt.api.{name}"), name)(*args, **options)


def make_callable(name: str) -> None:
    """Turns the package of this name, while it is being imported, into a `CallablePackage`."""
    sys.modules[name].__class__ = CallablePackage
