"""The default placement of serving: as much tensor parallelism as a node and the model allow."""

from __future__ import annotations

from asbuilt.errors import InputError, one_of
from asbuilt.families.shared.reader import is_whole
from asbuilt.plan.devices import Known, degrees, known
from asbuilt.plan.network import NODE
from asbuilt.plan.placement import Placement, served
from asbuilt.spec import Model, walk

MOST_GPUS = 2**20
MOST_DEGREE = 1024


def place(
    spec: Model,
    *,
    gpus: int | None,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    node: int = NODE,
    redundant: int | None = None,
) -> Placement:
    """Returns the placement with the given degrees, the others chosen.

    Without `tp`, tensor parallelism uses as many devices as it can within one `node`; the rest become pipeline stages,
    or copies if there are more devices than layers. `redundant` further replicas of experts are spread with them.
    Raises InputError naming a degree that does not suit the model or the number of devices.
    """
    for name, value in (("gpus", gpus), ("tp", tp), ("pp", pp), ("ep", ep)):
        if value is not None and not (is_whole(value) and 1 <= value <= MOST_GPUS):
            raise InputError(field=name, value=value, allowed=f"1 to {MOST_GPUS:,}")
    experts, found = ep or 1, known(spec)
    _require_experts(found, experts, redundant)
    if tp is None:
        share = max(1, (gpus or experts) // (pp or 1))
        tp = next(  # the largest one, tried first: a share of the model takes milliseconds to make
            d
            for d in range(min(node, MOST_DEGREE, share), 0, -1)
            if share % d == 0
            and not (experts % d and d % experts)
            and (share <= node or node % d == 0)
            and found.divides(d)
        )
    else:
        _require_tensor(found, tp)
    if max(tp, experts) % min(tp, experts):
        raise InputError("does not match tp", field="ep", value=experts, allowed=f"a divisor or a multiple of {tp}")
    width = max(tp, experts)
    own = min(tp, experts) if redundant else experts  # replicas make up for what does not divide
    if isinstance(refused := found.shard(tp, own), InputError):
        raise refused
    stages = pp or _stages(found, gpus or width, width)
    if stages > len(found.order):
        raise InputError("more stages than layers", field="pp", value=stages, allowed=f"1 to {len(found.order)}")
    every = gpus or width * stages
    if every % (stages * width):
        raise InputError(
            "is not a whole number of copies of the model",
            field="gpus",
            value=every,
            allowed=f"a multiple of {stages * width}, pp {stages} x max(tp {tp}, ep {experts})",
        )
    return served(every, tp=tp, pp=stages, ep=experts, redundant=redundant or 0)


def _stages(found: Known, gpus: int, width: int) -> int:
    rest = gpus // width if gpus % width == 0 else 1
    return rest if rest <= len(found.order) else 1


def _require_tensor(found: Known, tp: int) -> None:
    error = found.shard(tp)
    if isinstance(error, InputError):
        allowed = one_of(map(str, degrees(found.spec, MOST_DEGREE)))
        raise InputError(
            "does not divide the model",
            field="tp",
            value=tp,
            allowed=allowed,
            fix=f"{error.field} = {error.value} must be {error.allowed}",
        ) from error


def _require_experts(found: Known, ep: int, redundant: int | None) -> None:
    numbers = {n for _, part in walk(found.census.small) for n in part.spreads().values()}
    if redundant is not None:
        _require_replicas(numbers, ep, redundant)
    if ep == 1:
        return
    if not numbers:
        raise InputError("the model has no experts", field="ep", value=ep, allowed="1")
    if any((n + (redundant or 0)) % ep for n in numbers):
        allowed = [d for d in range(1, max(numbers) + 1) if all(n % d == 0 for n in numbers)]
        raise InputError("does not divide the experts", field="ep", value=ep, allowed=one_of(map(str, allowed)))


def _require_replicas(numbers: set[int], ep: int, redundant: int) -> None:
    """Raises InputError unless each of `ep` devices has as many of the experts and their replicas."""
    field = "redundant-experts"
    if not numbers:
        raise InputError("the model has no experts", field=field, value=redundant, fix="leave it out")
    if ep == 1:
        problem = "the experts are not spread over devices"
        raise InputError(problem, field=field, value=redundant, fix="give --ep too, as in --gpus 8 --ep 8")
    most = max(numbers) * (ep - 1)  # a replica on every device
    if not is_whole(redundant) or not 0 <= redundant <= most:
        raise InputError(field=field, value=redundant, allowed=f"a whole number from 0 to {most:,}")
    if any((n + redundant) % ep for n in numbers):
        fits = [n for n in range(most + 1) if not any((m + n) % ep for m in numbers)]
        near = sorted(sorted(fits, key=lambda n: abs(n - redundant))[:6])
        allowed = (
            one_of(map(str, near)) if near else f"none: {one_of(map(str, sorted(numbers)))} experts on {ep} devices"
        )
        problem = f"with it the experts are not divided evenly over ep {ep}"
        raise InputError(problem, field=field, value=redundant, allowed=allowed)
