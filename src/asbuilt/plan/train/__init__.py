"""Training plans: memory of the fullest device, FLOPs, time and cost of a placement, and what to change."""

from asbuilt.plan.train.options import Options
from asbuilt.plan.train.plan import Subject, TrainPlan, train

__all__ = ["Options", "Subject", "TrainPlan", "train"]
