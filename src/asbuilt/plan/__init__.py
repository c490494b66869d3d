"""Planning of serving and training: capacity, speed and cost on machines, from the parts' declarations; no torch.

`serve/` and `train/` read the same view of a device (`devices.py`). The package is itself callable:
`asbuilt.plan(model, gpu)`. Public names are imported on first use, so that `--help` imports no model.
"""

from typing import TYPE_CHECKING

from asbuilt.packages import make_callable, on_first_use

if TYPE_CHECKING:
    from asbuilt.plan.serve.ask import serve
    from asbuilt.plan.serve.conventions import Conventions
    from asbuilt.plan.serve.plan import ServePlan
    from asbuilt.plan.train.options import Options
    from asbuilt.plan.train.plan import TrainPlan, train
    from asbuilt.plan.train.subject import Subject

PUBLIC = {
    "Conventions": "asbuilt.plan.serve.conventions",
    "Options": "asbuilt.plan.train.options",
    "ServePlan": "asbuilt.plan.serve.plan",
    "Subject": "asbuilt.plan.train.subject",
    "TrainPlan": "asbuilt.plan.train.plan",
    "serve": "asbuilt.plan.serve.ask",
    "train": "asbuilt.plan.train.plan",
}
__all__ = ["Conventions", "Options", "ServePlan", "Subject", "TrainPlan", "serve", "train"]

if not TYPE_CHECKING:  # a checker would take every name for one
    __getattr__ = on_first_use(__name__, PUBLIC)
make_callable(__name__)
