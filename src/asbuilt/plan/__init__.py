"""Planning of serving and training: capacity, speed and cost on machines, from the parts' declarations; no torch.

`serve/` and `train/` read the same view of a device (`devices.py`). The package is itself callable:
`asbuilt.plan(model, gpu)`.
"""

from asbuilt.packages import make_callable
from asbuilt.plan.serve import Conventions, ServePlan, serve
from asbuilt.plan.train import Options, Subject, TrainPlan, train

__all__ = ["Conventions", "Options", "ServePlan", "Subject", "TrainPlan", "serve", "train"]

make_callable(__name__)
