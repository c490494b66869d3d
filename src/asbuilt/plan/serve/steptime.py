"""The time of a step of continuous batching: sequences that decode, each after its own past, and chunks of prompts.

Every time is the roofline's: passes of one sequence and of one chunk are timed at some pasts and sizes, and what is
linear in between is interpolated. In a step that does both, each kind of part reads its weights once and takes the
longer of all its bytes and all its FLOPs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from asbuilt.plan.devices import DeviceStage
from asbuilt.plan.serve.curve import Curve, Vector
from asbuilt.plan.serve.roofline import Roofline, Run
from asbuilt.spec import Kind, Pass

# A chunk's time is a quadratic of its size through three of these fractions of the largest chunk.
MOST_CURVES = 20
SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


class StageTimes:
    """Seconds of bytes and of FLOPs by kind of part, on one stage: of weights, of a sequence, and of a chunk.

    Vectors have the seconds of bytes of each kind first, then those of FLOPs. `each` is the tokens that a decoding
    sequence computes in a step.
    """

    def __init__(self, roofline: Roofline, stage: DeviceStage, *, chunk: int, longest: int, each: int) -> None:
        self._roofline, self._stage, self._each, self._longest = roofline, stage, each, longest
        self._chunk = chunk
        self.kinds: list[Kind] = [c.kind for c in self._run(Pass(tokens=chunk, logits="last")).components]
        self._sizes = sorted({1, *(max(1, int(chunk * share)) for share in SIZES)})
        self._chunks: dict[int, Curve] = {}
        self._weights: dict[int, Vector] = {}
        few, two = (self._run(Pass(tokens=1, batch=n)).link_seconds for n in (1, 2))
        self.link_each, self.link_fixed = two - few, 2 * few - two

    def _run(self, run: Pass) -> Run:
        return self._roofline.run(self._stage, run, 1)

    def _vector(self, run: Pass) -> Vector:
        """Returns a pass's seconds without those of its weights."""
        found = {c.kind: c for c in self._run(run).components}
        reading = [self._roofline.reading(c.lookups, c.cache) if (c := found.get(kind)) else 0.0 for kind in self.kinds]
        return *reading, *(c.compute_seconds if (c := found.get(kind)) else 0.0 for kind in self.kinds)

    def decoding(self, past: int) -> Vector:
        """Returns the seconds of one sequence's step after `past` tokens."""
        return self._vector(Pass(tokens=self._each, past=past))

    @cached_property
    def _of_rows(self) -> Curve:
        """Seconds of the weights that a pass of that many rows reads, which are the same for any number of copies."""
        roofline, stage = self._roofline, self._stage

        def read(rows: int) -> Vector:
            found = roofline.weights(stage, Pass(tokens=1, batch=max(1, rows)))
            return tuple(roofline.reading(found.get(kind, 0), 0) for kind in self.kinds)

        capacity = roofline.capacity
        rows = 2 * max(self._chunk, capacity.chunk)  # short prompts share a chunk
        key = (roofline.reading(1, 0), capacity.conventions.embedding, capacity.adapters, rows, *self.kinds)
        if key not in stage.curves:
            if len(stage.curves) >= MOST_CURVES:
                stage.curves.clear()
            stage.curves[key] = Curve(read, rows)
        curve = stage.curves[key]
        assert isinstance(curve, Curve)
        return curve

    def weights(self, rows: int) -> Vector:
        """Returns the seconds of reading weights, of experts those that `rows` tokens activate; nothing for none."""
        if rows not in self._weights:
            self._weights[rows] = self._of_rows.at(rows)
        return self._weights[rows]

    def _curve(self, size: int) -> Curve:
        if size not in self._chunks:
            self._chunks[size] = Curve(
                lambda past: self._vector(Pass(tokens=size, past=past, logits="last")), self._longest
            )
        return self._chunks[size]

    def prefill(self, tokens: int, past: int) -> Vector:
        """Returns the seconds of a chunk of `tokens` after `past`: exact for quadratics of its size."""
        sizes = self._sizes
        i = bisect_left(sizes, tokens)
        if i < len(sizes) and sizes[i] == tokens:
            return self._curve(tokens).at(past)
        near = sizes[max(0, min(i - 1, len(sizes) - 3)) :][:3]
        weights = [math.prod((tokens - other) / (x - other) for other in near if other != x) for x in near]
        values = [self._curve(x).at(past) for x in near]
        return tuple([sum(w * v for w, v in zip(weights, each, strict=True)) for each in zip(*values, strict=True)])


class StepTimes:
    """The steps of one group of devices that share sequences; `copies` of it are alike.

    Vectors are those of every stage, one after the other. With `pp` stages the sequences and chunks of a step are
    divided into `pp` passes, each of which goes through every stage, and all take the time of the slowest stage.
    """

    def __init__(self, roofline: Roofline, *, chunk: int, longest: int, each: int = 1) -> None:
        device = roofline.capacity.device
        self.stages = [
            StageTimes(roofline, stage, chunk=min(chunk, longest), longest=longest, each=each)
            for stage in device.stages
        ]
        self.pp, self.each, self.chunk = roofline.capacity.layout.pp, each, chunk
        self._spans: list[tuple[int, int]] = []
        at = 0
        for stage in self.stages:
            self._spans.append((at, len(stage.kinds)))
            at += 2 * len(stage.kinds)
        self.width = at

    def decoding(self, past: int) -> Vector:
        """Returns the seconds of one sequence's step after `past` tokens."""
        return tuple(x for stage in self.stages for x in stage.decoding(past))

    def prefill(self, tokens: int, past: int) -> Vector:
        """Returns the seconds of a chunk."""
        if len(self.stages) == 1:
            return self.stages[0].prefill(tokens, past)
        return tuple(x for stage in self.stages for x in stage.prefill(tokens, past))

    def seconds(self, sequences: int, decoding: Sequence[float], tokens: int = 0, prefill: Vector = ()) -> float:
        """Returns the time of a step of `sequences`, whose seconds are summed in `decoding`, and of chunks."""
        pp, share, part = self.pp, 1.0, 1.0
        rows = sequences * self.each + tokens
        if pp > 1:
            portion = math.ceil(sequences / pp)
            passes = min(pp, math.ceil(tokens / self.chunk)) if tokens else 1
            share, part = (portion / sequences if sequences else 0.0), 1 / passes
            rows = portion * self.each + math.ceil(tokens / passes)
        longest = 0.0
        for stage, (at, kinds) in zip(self.stages, self._spans, strict=True):
            total, weights = stage.link_fixed + stage.link_each * rows, stage.weights(rows)
            for i in range(kinds):
                reading = weights[i] + share * decoding[at + i]
                computing = share * decoding[at + kinds + i]
                if prefill:
                    reading += part * prefill[at + i]
                    computing += part * prefill[at + kinds + i]
                total += reading if reading >= computing else computing
            longest = max(longest, total)
        return longest * pp
