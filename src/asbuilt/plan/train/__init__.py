"""Training plans: memory of the fullest device, FLOPs, time and cost of a placement, and what to change."""

from asbuilt.plan.train.options import Options
from asbuilt.plan.train.plan import TrainPlan, train
from asbuilt.plan.train.subject import Subject

__all__ = ["Options", "Subject", "TrainPlan", "train"]
