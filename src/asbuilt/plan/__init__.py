"""What a machine holds, how fast it goes and what training takes, from the declarations of the parts; no torch."""

from asbuilt.plan.options import Options
from asbuilt.plan.training import Subject, TrainPlan, train

__all__ = ["Options", "Subject", "TrainPlan", "train"]
