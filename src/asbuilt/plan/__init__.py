"""What a machine holds, how fast it goes and what training takes, from the declarations of the parts; no torch.

`serve/` and `train/` are two readers of one view of a device (`devices.py`). The package is itself callable:
`asbuilt.plan(model, gpu)`.
"""

from asbuilt.packages import make_callable
from asbuilt.plan.serve import Conventions, ServePlan, serve
from asbuilt.plan.train import Options, Subject, TrainPlan, train

__all__ = ["Conventions", "Options", "ServePlan", "Subject", "TrainPlan", "serve", "train"]

make_callable(__name__)
