"""The options of commands that run a model: sampling, threads, device and dtype, under the names that people know."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from asbuilt.cli.types import Tokens

if TYPE_CHECKING:
    from asbuilt.api.running import Running
    from asbuilt.generate.sampling import Sampling

C = TypeVar("C", bound=Callable[..., Any])

AUTO = "auto"
SAMPLING = (
    click.option(
        "--temperature", "--temp", "temperature", type=float, default=0.0, show_default=True,
        help="0 takes the most likely token.",
    ),
    click.option("--top-k", type=int, help="Sample from the k most likely tokens."),
    click.option("--top-p", type=float, help="Sample from the fewest tokens whose probabilities sum to p."),
    click.option("--min-p", type=float, help="Sample from tokens at least p times as likely as the most likely."),
    click.option(
        "--repetition-penalty", "--repeat-penalty", "repetition_penalty", type=float, default=1.0, show_default=True,
        help="Above 1, makes repeated tokens less likely.",
    ),
    click.option(
        "-s", "--seed", "seed", type=int, default=0, show_default=True, help="The same seed gives the same text."
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given several times."),
)  # fmt: skip
PLACE = (
    click.option(
        "-t", "--threads", "threads", type=int, help="Threads to compute with; by default as many as there are cores."
    ),
    click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|mps", help="Where to run the model."),
    click.option(
        "--dtype",
        default=AUTO,
        show_default=True,
        help="Compute in fp32, bf16 or fp16. auto: as stored, or fp32 where that is much faster on this machine and "
        "fits; fp32 for quantised weights.",
    ),
    click.option(
        "--packed/--expanded",
        default=None,
        help="Keep the weights of a GGUF file or MXFP4 checkpoint packed, or expand them to the compute dtype. By "
        "default those of a GGUF file stay packed where the native kernels multiply them; without these that is "
        "slower.",
    ),
    click.option("--adapter", metavar="FOLDER", help="Apply the LoRA adapters in this folder, in PEFT's layout."),
)
context_option = click.option(
    "-c", "--context", "context", type=Tokens(), help="Use at most this many tokens of the model's context."
)
kv_option = click.option(
    "--kv-dtype",
    help="Format of the cache, by default that of computing: bf16, fp16, fp8 ..., or with scales for each token and "
    "head int8:head, fp8:head, int4:head.",
)
threads_option = PLACE[0]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a command line says of where and how the model runs."""

    threads: int | None
    device: str
    dtype: str | None
    packed: bool | None
    adapter: str | None

    def taken(self) -> tuple[Running, int]:
        """Sets the threads, and returns how the model is run and with how many; imports torch.

        Raises InputError for a device that is not here, and for what is no dtype or number of threads.
        """
        from asbuilt.api.running import Running, require_device, use_threads
        from asbuilt.checkpoint.load import dtype_of

        count = use_threads(self.threads, "--threads")
        device = require_device(self.device, "--device")
        dtype = None if self.dtype in (None, "", AUTO) else dtype_of(self.dtype, "--dtype")
        return Running(dtype=dtype, packed=self.packed, adapter=self.adapter, device=device), count


def options_of(group: tuple[Callable[[C], C], ...], names: Sequence[str], into: str, make: Any) -> Callable[[C], C]:  # noqa: ANN401
    """Returns what adds the options to a command, in order, which is given those of `names` as one, `make` of them."""

    def add(command: C) -> C:
        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> Any:  # noqa: ANN401
            given[into] = make(**{name: given.pop(name) for name in names})
            return command(*args, **given)

        made = cast(C, run)
        for option in reversed(group):
            made = option(made)
        return made

    return add


SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
sampling_options = options_of(SAMPLING, SAMPLED, "sampled", dict)
place_options = options_of(PLACE, [field.name for field in fields(Place)], "place", Place)


@contextmanager
def starting() -> Iterator[None]:
    """Has Python look for garbage only afterwards: while modules and a model are loaded it would find none, slowly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def echoed(sampling: Sampling, place: Place, threads: int, **more: object) -> dict[str, Any]:
    """Returns the settings of a run, for --json."""
    said = {name: getattr(sampling, name) for name in SAMPLED}
    return {"settings": said | {"threads": threads, "device": place.device} | more}
