"""Training plans: memory of the fullest device, FLOPs, time and cost of a placement, and what to change."""

from typing import TYPE_CHECKING

from asbuilt.packages import on_first_use

if TYPE_CHECKING:
    from asbuilt.plan.train.options import Options
    from asbuilt.plan.train.plan import TrainPlan, train
    from asbuilt.plan.train.subject import Subject

PUBLIC = {
    "Options": "asbuilt.plan.train.options",
    "Subject": "asbuilt.plan.train.subject",
    "TrainPlan": "asbuilt.plan.train.plan",
    "train": "asbuilt.plan.train.plan",
}
__all__ = ["Options", "Subject", "TrainPlan", "train"]

if not TYPE_CHECKING:  # a checker would take every name for one
    __getattr__ = on_first_use(__name__, PUBLIC)
