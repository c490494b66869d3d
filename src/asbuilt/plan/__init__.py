"""What a machine holds, how fast it goes and what training takes, from the declarations of the parts; no torch.

The package is itself callable: `asbuilt.plan(model, gpu)`.
"""

from asbuilt.packages import make_callable
from asbuilt.plan.conventions import Conventions
from asbuilt.plan.options import Options
from asbuilt.plan.serving import ServePlan, serve
from asbuilt.plan.training import Subject, TrainPlan, train

__all__ = ["Conventions", "Options", "ServePlan", "Subject", "TrainPlan", "serve", "train"]

make_callable(__name__)
