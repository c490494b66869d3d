"""Runs several recipes after another, as one of the processes of a group: `many_worker.py JOBS.json`.

A job is a recipe's file, whether it resumes, the step at which every process dies, if any, a file for what is sent, and
one for the memory of each rank.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_memory import Same, measured
from traffic import Traffic

from asbuilt.api.watch import sample
from asbuilt.train.many import loop
from asbuilt.train.recipe import read
from asbuilt.train.step import Stepped


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


class Watched(loop.Loop):
    """A loop whose processes all die before a step, or whose last step's traffic or memory is measured."""

    dies, sent, memory = 0, "", ""

    def stepped(self) -> Stepped:
        at = self.run.position.step
        if self.memory and not at:
            self.run.data = Same(self.run)
        if at and at == self.dies:
            raise Killed
        if self.memory and at == self.run.recipe.run.steps - 1:
            made, found = measured(self.run, super().stepped)
            Path(self.memory).with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(found))
            return made
        with Traffic() if self.sent else nullcontext() as traffic:
            made = super().stepped()
        if traffic is not None:
            found = json.dumps([[*key, size] for key, size in traffic.bytes.items()])
            Path(self.sent).with_suffix(f".{dist.get_rank()}.json").write_text(found)
            if self.run.ranks.first:
                Path(self.sent).write_text(found)
        return made


def main(jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop.Loop = Watched  # type: ignore[misc]
    for job in jobs:
        Watched.dies, Watched.sent = job.get("dies", 0), job.get("sent", "")
        Watched.memory = job.get("memory", "")
        try:
            loop.run(read(job["recipe"]), resume=job.get("resume", False), sample=sample)
        except Killed:
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
