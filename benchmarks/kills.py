"""Kills a training run ten times without warning, resumes it each time, and compares its end with a run left alone.

Half of the kills are at random moments, half while a file of a checkpoint is written. Run: python benchmarks/kills.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "train"))
from crashes import killed, require_valid
from small_runs import log, recipe, require_equal, state

from asbuilt.train import loop

KILLS, STEPS = 10, 400
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")
CHANGES = (f"run.steps={STEPS}", "run.save_every=1", "run.validate_every=0")


def main() -> None:
    """Prints a line for each kill, and whether the run ended as if there had been none."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        made, resume = recipe(folder, "run", *CHANGES), False
        for number in range(KILLS):
            writing = random.choice(FILES) if number % 2 else ""
            delay = 0.0 if writing else random.random()
            died = killed(made, folder / "told", delay, writing=writing, resume=resume)
            kept, resume = require_valid(folder / "run"), True
            done = [int(str(line["step"])) for line in log_until(folder / "run") if "loss" in line][-1]
            where = f"while {writing} was written" if writing else "at a random moment"
            print(f"{'killed' if died else 'ended'} {where}: step {done} was done, {kept} is kept", flush=True)
            assert kept >= done - 1
        loop.run(made, resume=True)
        loop.run(recipe(folder, "whole", *CHANGES))
        require_equal(state(folder / "whole", STEPS), state(folder / "run", STEPS))
        assert log(folder / "whole") == log(folder / "run")
        print(
            f"resumed {KILLS} times: weights, optimizer and log are those of a run that was never stopped, bit by bit"
        )


def log_until(run: Path) -> list[dict[str, object]]:
    """The lines of a log but one that was cut off by the kill."""
    file = run / "log.jsonl"
    text = file.read_text()
    file.write_text(text[: text.rindex("\n") + 1])
    return log(run)


if __name__ == "__main__":
    main()
