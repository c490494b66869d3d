"""The memory lines of a training plan: what the fullest device holds, derived line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asbuilt.plan.lines import Line, Number, total
from asbuilt.plan.train.optimizers import State
from asbuilt.plan.train.options import ASSUMPTIONS
from asbuilt.plan.train.shares import split
from asbuilt.plan.train.stages import StageMemory

if TYPE_CHECKING:
    from asbuilt.plan.train.plan import Trial

KEEPS = {
    "none": "all that autograd saves",
    "selective": "all but what parts declare they can recompute without a product with a weight",
    "full": "each block's input",
    "megatron-selective": "all but the scores of attention, which are computed again",
    "torchtitan-op": "each block's input, the results of attention and of every other product",
}


def ladder(trial: Trial) -> list[Line]:
    """Returns the fullest device's memory line by line; the last one is the sum of the others."""
    lines = [line for line in _held(trial) if line.value]
    return [*lines, total("per device", {line.name: line.value for line in lines})]


def against(trial: Trial) -> list[Line]:
    """Returns the lines that compare the total with the device's memory."""
    memory, reserve, held = trial.memory, trial.reserve, trial.fullest.total
    numbers = {"memory": memory, "reserve": reserve, "per device": held}
    return [
        Line(name="memory", value=memory, source=trial.memory_source),
        Line(
            name="reserve",
            value=reserve,
            formula="ceil({share} × {memory})",
            source=ASSUMPTIONS["reserve"],
            numbers={"share": trial.options.reserve, "memory": memory},
        ),
        Line(
            name="left",
            value=memory - reserve - held,
            formula="{memory} − {reserve} − {per device}",
            numbers=numbers,
            note="" if trial.fits else "does not fit",
        ),
    ]


def _held(trial: Trial) -> Iterator[Line]:
    stage, options = trial.fullest, trial.options
    recipe = options.recipe
    yield _state(stage, "weights", lambda s: s.weights, recipe.weight_width, 3)
    yield _state(stage, "gradients", lambda s: s.gradients, recipe.gradient_width, 2)
    yield _state(stage, "master weights", lambda s: s.master, recipe.master_width, 1)
    for name in stage.state.optimizer:
        yield _state(stage, name, lambda s, n=name: s.optimizer.get(n, 0), recipe.state_width, 1)
    if stage.on_host:
        yield Line(
            name="in the host's memory",
            value=-stage.on_host,
            formula="0 − {moved there}",
            numbers={"moved there": stage.on_host},
            note=f"--offload {options.offload}",
        )
    yield from _moments(stage)


def _state(stage: StageMemory, name: str, of: Callable[[State], int], width: int, sharded_from: int) -> Line:
    """Returns the line of one kind of state, derived from the number of parameters if it has a fixed width."""
    layout, sharded = stage.layout, stage.layout.zero >= sharded_from
    pieces, numbers, value = [], {}, 0
    groups = (
        ("", stage.section.dense, layout.sharded),
        ("experts' ", stage.section.experts, layout.sharded_experts),
    )
    twice = stage.stages_held if sharded_from > 1 or not layout.zero else 1
    for whose, state, ranks in groups:
        whole, ways = of(state), ranks if sharded else 1
        value += twice * split(whole, ways)
        if whole:
            said, put_in = _whole(stage, state, whose, name, whole, width)
            numbers |= put_in
            if ways > 1:
                said, numbers[f"{whose}ranks"] = f"ceil({said} / {{{whose}ranks}})", ways
            if twice > 1:
                said, numbers["stages held"] = f"{{stages held}} × {said}", twice
            pieces.append(said)
    note = f"sharded by ZeRO-{layout.zero}" if sharded and max(n for _, _, n in groups) > 1 else ""
    return Line(name=name, value=value, formula=" + ".join(pieces), numbers=numbers, note=note)


def _whole(
    stage: StageMemory, state: State, whose: str, name: str, whole: int, width: int
) -> tuple[str, dict[str, Number]]:
    """Returns the formula of what ZeRO does not shard, and its numbers."""
    trained = state.gradients // stage.job.recipe.gradient_width
    if width and whole == trained * width:
        return f"{{{whose}parameters}} × {{bytes each}}", {f"{whose}parameters": trained, "bytes each": width}
    return f"{{{whose}{name} in all}}", {f"{whose}{name} in all": whole}


def _moments(stage: StageMemory) -> Iterator[Line]:
    """Yields the lines of temporary memory: gathered weights, saved tensors, and working memory."""
    yield Line(name="gathered weights", value=stage.gathered, source=ASSUMPTIONS["gathered"])
    yield Line(name="gradients before they are scattered", value=stage.scattered, source=ASSUMPTIONS["gathered"])
    yield _activations(stage)
    yield Line(name="outside the blocks", value=stage.outside, note="inputs of the final norm and head, tokens, tables")
    if stage.temporary == stage.gradient_peak > max(stage.loss_peak, stage.recompute_peak):
        yield Line(
            name=f"{'the table' if stage.job.loss == 'contrastive' else 'the head'}'s gradient",
            value=stage.temporary,
            source=ASSUMPTIONS["gradient"],
            note="the largest of this, the loss and a block's backward pass",
        )
    elif stage.loss_peak >= stage.recompute_peak:
        alive = stage.logits_alive
        gradient = stage.loss_peak - alive * stage.logits
        more = {"gradient of the head's input": gradient} if gradient else {}
        formula = " + ".join(["{at once} × {logits}", *(f"{{{name}}}" for name in more)])
        yield Line(
            name="the loss",
            value=stage.loss_peak,
            formula=formula,
            source=ASSUMPTIONS["contrastive" if stage.job.loss == "contrastive" else "loss"],
            numbers={"at once": alive, "logits": stage.logits, **more},
            note="larger than a block's backward pass",
        )
    else:
        yield Line(
            name="a block's backward pass",
            value=stage.recompute_peak,
            source=ASSUMPTIONS["backward"],
            note="recomputed tensors and working memory; larger than the loss",
        )


def _activations(stage: StageMemory) -> Line:
    """Returns micro-batches (interleaved: chunks) in flight x blocks x bytes saved by one block, kind by kind."""
    way, several, v = stage.job.checkpointing, len(stage.section.kinds) > 1, stage.job.interleave
    numbers: dict[str, Number] = {"micro-batches at once": stage.in_flight}
    if v > 1:
        numbers = {"chunks at once": stage.chunks_in_flight, "chunks of a stage": v}
    terms = []
    for i, (kind, count) in enumerate(stage.section.kinds):
        which = f" of kind {i + 1}" if several else ""
        numbers |= {f"blocks{which}": count, f"kept by one{which}": kind.kept[way]}
        terms.append(f"{{blocks{which}}} × {{kept by one{which}}}")
    formula = f"{{micro-batches at once}} × ({' + '.join(terms)})"
    if v > 1:
        formula = f"ceil({{chunks at once}} × ({' + '.join(terms)}) / {{chunks of a stage}})"
    note = f"checkpointing {way}: {KEEPS[way]}"
    return Line(name="activations", value=stage.activations, formula=formula, numbers=numbers, note=note)


def logits(trial: Trial) -> Iterator[Line]:
    """Yields the line of one float32 tensor of logits, if there are any."""
    stage = trial.stages[-1]
    if stage.logits:
        rows = split(stage.shares.rows, stage.job.chunks)
        yield Line(
            name="logits",
            value=stage.logits,
            formula="{rows} × {bytes of a row}",
            numbers={"rows": rows, "bytes of a row": stage.logits // rows},
            note="float32, of the rows processed at once; included in the loss",
        )
