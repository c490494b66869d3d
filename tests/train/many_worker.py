"""Runs several recipes after another, as one of the processes of a group: `many_worker.py JOBS.json`.

A job is a recipe's file, whether it resumes, and the step at which every process dies, if any.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asbuilt.train.loop import Progress
from asbuilt.train.many import loop
from asbuilt.train.recipe import read


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


class Dying(loop.Loop):
    """A loop whose processes all die after a step."""

    at = 0

    def stepped(self):  # noqa: ANN201
        if self.at and self.run.position.step == self.at:
            raise Killed
        return super().stepped()


def main(jobs: list[dict[str, object]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop.Loop = Dying  # type: ignore[misc]
    for job in jobs:
        Dying.at = int(str(job.get("dies", 0)))
        try:
            loop.run(read(str(job["recipe"])), resume=bool(job.get("resume")), report=said)
        except Killed:
            dist.barrier()
    dist.destroy_process_group()


def said(at: Progress) -> None:
    print(at, flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
