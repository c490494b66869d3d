"""The report: every figure predicted from the description and the calibration, then measured on the built model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asbuilt import cost
from asbuilt.kernels import native
from asbuilt.kernels.memory import memory
from asbuilt.measure import native_stacks, run, timing
from asbuilt.measure.calibrate import DRIFT, calibrate, drift_now, machine
from asbuilt.measure.loading import Loading
from asbuilt.measure.loss import WINDOW, nats_per_token
from asbuilt.measure.rates import DTYPES, lower_quartile
from asbuilt.measure.trace import trace
from asbuilt.nn.build import interleave
from asbuilt.nn.model import Model
from asbuilt.spec import model as spec_model
from asbuilt.spec import weights
from asbuilt.spec.part import Pass
from asbuilt.tables import Table, escaped, html, joined

# Tolerances: zero for exact counts, and what depends on the library or the machine otherwise.
SAVED, MEMORY, TIME = 0.01, 0.03, 0.20
# Bytes that the library may use in addition, if more than the tolerance: it repacks operands of products in narrow
# dtypes. With AVX-512 that is 0.2 MB; with AMX 0.9 MB for a model of 22 MB, and 1.8 MB for one of 288 MB.
SCRATCH = 2**20
PREFILL, PROMPT, STEPS = 512, 128, 64
# Speeds are lower quartiles over ROUNDS, each a lower quartile over that many prefills and over STEPS steps, as the
# calibration's times are: the machine's speed without interference.
ROUNDS, PREFILLS = 4, 3
# Largest changes of the loss with a cache in another format: of 8 bits or more, and of 4.
LOSS, LOSS_OF_4 = 0.001, 0.05
BUSY = 0.1  # fraction of the CPUs used by other processes, from which on a note is printed


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure; `error` is measured / predicted - 1, `exact` figures have tolerance 0."""

    figure: str
    unit: str
    predicted: float
    measured: float
    tolerance: float

    @property
    def error(self) -> float:
        """The relative error of the prediction, measured / predicted - 1."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted else float("inf")

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= self.tolerance

    @property
    def difference(self) -> str:
        """The error as printed."""
        return "0" if self.predicted == self.measured else f"{self.error:+.2%}"

    @property
    def verdict(self) -> str:
        """Whether the figure is within its tolerance, in words."""
        if not self.tolerance:
            return "exact" if self.ok else "MISSED: should be exact"
        within = f"within {100 * self.tolerance:.3g}%"
        return within if self.ok else f"MISSED: should be {within}"

    def document(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return {
            "figure": self.figure,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
            "tolerance": self.tolerance,
            "ok": self.ok,
        }

    @property
    def timed(self) -> bool:
        """Whether the figure is a speed, which other work on the machine can distort."""
        return self.unit in ("tokens/s", "pairs/s")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows, the machine they were measured on, and notes on its speed.

    Prints as the command does, and displays as a table in a notebook.
    """

    model: str
    dtype: str
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    loading: Loading | None = None
    native: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every figure other than a speed is within its tolerance."""
        return all(row.ok for row in self.rows if not row.timed)

    @property
    def title(self) -> str:
        """The model and the machine in one line."""
        machine = self.machine["machine"]
        by = "" if self.native is None else f", native kernels ({self.native})"
        return f"{self.model} in {self.dtype} on {machine['processor']}, {machine['threads']} threads{by}"

    def document(self) -> dict[str, Any]:
        """Returns the document that `asbuilt measure --json` prints."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "native": self.native,
            "machine": dict(self.machine),
            "rows": [row.document() for row in self.rows],
            "notes": list(self.notes),
            "ok": self.ok,
            "loading": None if self.loading is None else self.loading.document(),
        }

    def table(self) -> Table:
        """Returns the rows as a table."""
        columns = ("figure", "unit", "predicted", "measured", "difference", "")
        rows = [(r.figure, r.unit, r.predicted, r.measured, r.difference, r.verdict) for r in self.rows]
        return Table("Predicted and measured", columns, rows)

    @property
    def beside(self) -> list[str]:
        """What is said below the table: loading, and notes."""
        told = [] if self.loading is None else [str(self.loading)]
        return [*told, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return joined([self.title, self.table(), *self.beside])

    def _repr_html_(self) -> str:
        said = (escaped(text) for text in (self.title, *self.beside))
        return "".join(f"<p>{text}</p>" for text in said) + html([self.table()])


Say = Callable[[str], None]


def measure(
    model: Model,
    *,
    name: str = "",
    loading: Loading | None = None,
    refresh: bool = False,
    kv: str | None = None,
    text: Text | None = None,
    say: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> Report:
    """Returns the report for a built model in float32 or bfloat16 on the CPU, with what `loading` it took.

    With `kv` it has the cache in that format too: its bytes, and the loss on `text` beside that without it. Speeds are
    those with the native kernels, where they are there: packed matrices are interleaved.

    Every figure is predicted before it is measured, from timings that never run the model: of stacks of other sizes
    where its layers are native calls, else of the library's calls, from the calibration. `say` is called with progress,
    `warn` with problems of the calibration cache. Raises KeyError for a dtype that is not calibrated.
    """
    dtype = {value: key for key, value in DTYPES.items()}[model.dtype]
    with native.switched_off():  # what is counted is torch's: its allocator does not see what the library holds
        exact = tuple(counted(model, say=say))
        exact += () if kv is None else tuple(in_format(model, kv, text, say=say))
    interleave(model)
    found, speeds, notes = _timed(model, dtype, refresh, say, warn)
    rows = (*exact, *speeds)
    return Report(
        model=name or model.spec.name,
        dtype=dtype,
        machine=found,
        rows=rows,
        notes=notes,
        loading=loading,
        native=native.instructions(),
    )


def counted(model: Model, *, say: Say = lambda text: None) -> Iterator[Row]:
    """Yields the rows that are counted rather than timed, and do not depend on the machine's load."""
    spec, width = model.spec, model.dtype.itemsize
    dtype = {value: key for key, value in DTYPES.items()}[model.dtype]
    tokens = min(PREFILL, spec.max_positions)
    whole = Pass(tokens=tokens, width=width)
    last = Pass(tokens=tokens, width=width, logits="last")

    yield _row("parameters", "", cost.total_parameters(spec), run.parameters(model))
    packed = sorted({weight.format for _, weight, _ in weights(spec) if weight.format is not None})
    yield _row(
        f"weights, {', '.join((*packed, dtype))}", "bytes", cost.weight_bytes(spec, dtype), run.weight_bytes(model)
    )
    say("counting")
    yield _row(f"forward, {tokens} tokens", "FLOPs", cost.flops(spec, whole).forward, run.flops(spec, tokens))
    cache = cost.cache(spec, tokens, dtype)
    yield _row(f"cache, {tokens} tokens", "bytes", cache.at_seq, run.cache_bytes(model, 1, tokens))
    one = cache.per_token + (cache.per_source_token if "source" in spec.reads else 0)
    told = "cache per token read and one written" if "source" in spec.reads else "cache per token"
    allocated = run.cache_bytes(model, 1, 1)
    if cache.fixed and "source" not in spec.reads:  # states of a sequence are no part of a token
        allocated = run.cache_bytes(model, 1, 2) - allocated
    yield _row(told, "bytes", one, allocated)

    if not packed:  # those of packed weights depend on which weights beside them are trained
        yield from _trained(model, whole, say)

    say("prefill")
    peak = cost.weight_bytes(spec, dtype) + cache.at_seq + memory(spec).peak_bytes(last)
    allowed = MEMORY if dtype == "fp32" else max(MEMORY, SCRATCH / peak)
    yield _row(f"peak memory of prefill, {tokens} tokens", "bytes", peak, run.prefill_peak(model, tokens), allowed)


def _trained(model: Model, whole: Pass, say: Say) -> Iterator[Row]:
    say("one training step")
    kept, measured = cost.saved(model.spec, whole), run.saved_bytes(model, whole.tokens)
    yield _row(f"saved by one training step, {whole.tokens} tokens", "bytes", kept.all, measured[0], SAVED)
    yield _row("saved by its loss", "bytes", kept.loss, measured[1], SAVED)


@dataclass(frozen=True, kw_only=True)
class Text:
    """The tokens that a loss is measured on, and the token that begins each window, if there is one.

    A text that the model itself `sampled` has, on average, the least loss for the model as it sampled.
    """

    ids: Sequence[int]
    first: int | None = None
    sampled: bool = False


def in_format(model: Model, kv: str, text: Text | None, *, say: Say = lambda text: None) -> Iterator[Row]:
    """Yields the bytes of a cache in the format `kv`, and the loss of a text beside that with the compute dtype."""
    spec, tokens = model.spec, min(PREFILL, model.spec.max_positions)
    dtype = {value: key for key, value in DTYPES.items()}[model.dtype]
    held = cost.cache(spec, tokens, kv, state=dtype)
    yield _row(f"cache in {kv}, {tokens} tokens", "bytes", held.at_seq, run.cache_bytes(model, 1, tokens, kv))
    if text is None:
        return
    say(f"loss with the cache in {kv}")
    told = "loss on a sampled text" if text.sampled else "loss"
    window = min(WINDOW, spec.max_positions)
    plain = nats_per_token(model, text.ids, text.first, window)
    coded = nats_per_token(model, text.ids, text.first, window, kv)
    yield _row(f"{told}, cache in {kv}", "nats per token", plain, coded, LOSS_OF_4 if kv == "int4:head" else LOSS)


class _Calls:
    """Predicts a model from its library calls, and those from this machine's calibration."""

    timing = "it was calibrated"

    def __init__(self, model: Model, dtype: str, refresh: bool, say: Say, warn: Say) -> None:
        self.spec, self.dtype, self.said = model.spec, dtype, {"say": say, "warn": warn}
        self.calibration = calibrate(refresh=refresh, **self.said)

    @property
    def others(self) -> float | None:
        return self.calibration.others

    def again(self) -> None:
        self.calibration = calibrate(refresh=True, **self.said)

    def seconds(self) -> tuple[float, float]:
        """Returns the predicted seconds of a prefill and of a decode step halfway."""
        tokens, prompt, steps = sizes(self.spec)
        prefill = trace(self.spec, tokens=tokens, past=0, dtype=DTYPES[self.dtype])
        decode = trace(self.spec, tokens=1, past=prompt + steps // 2, dtype=DTYPES[self.dtype])
        return prefill.seconds(self.calibration, self.dtype), decode.seconds(self.calibration, self.dtype)

    def drift(self) -> float:
        """Returns how many times slower or faster the machine is than at calibration."""
        return drift_now(self.calibration)

    def document(self) -> dict[str, Any]:
        return asdict(self.calibration)


class _Stacks:
    """Predicts a model whose layers are one native call from stacks of other sizes that are as well, timed now."""

    timing = "stacks of layers were timed"

    def __init__(self, model: Model, dtype: str, say: Say) -> None:
        self.spec, self.dtype, self.say = model.spec, dtype, say
        say("timing stacks of layers")
        self.stacks = native_stacks.Stacks(self.spec, dtype)
        self.again()

    def again(self) -> None:
        others = timing.Others()
        self.known = self.stacks.speeds()
        self.others = others.share()

    def seconds(self) -> tuple[float, float]:
        """Returns the predicted seconds of a prefill and of a decode step."""
        return native_stacks.predicted_seconds(self.spec, self.dtype, self.known, sizes(self.spec)[0])

    def drift(self) -> float:
        """Returns how many times slower or faster the stacks are than they were before the model."""
        self.say("timing stacks of layers again")
        return self.stacks.drift()

    def document(self) -> dict[str, Any]:
        return {"machine": machine(), "stacks": self.known.document(), "others": self.others}


def _timed(
    model: Model, dtype: str, refresh: bool, say: Say, warn: Say
) -> tuple[dict[str, Any], tuple[Row, ...], tuple[str, ...]]:
    """Returns the machine, its predicted speeds beside those measured, and notes.

    If the machine's speed changed in between, both are repeated once, regardless of whether the prediction was met.
    """
    by = _Calls(model, dtype, refresh, say, warn) if model.native is None else _Stacks(model, dtype, say)
    predicted, measured, others, drift = _predicted_and_measured(model, by, say)
    if drift > DRIFT:
        say(f"this machine's speed changed by a factor of {drift:.2f} meanwhile")
        by.again()
        predicted, measured, others, drift = _predicted_and_measured(model, by, say)
    tokens, prompt, _ = sizes(model.spec)
    rows = (
        _row(f"prefill, {tokens} tokens", "tokens/s", tokens / predicted[0], tokens / measured[0], TIME),
        _row(f"decode after {prompt} tokens", "tokens/s", 1 / predicted[1], 1 / measured[1], TIME),
    )
    return by.document(), rows, tuple(_notes(drift, {by.timing: by.others, "speeds were measured": others}))


def _predicted_and_measured(
    model: Model, by: _Calls | _Stacks, say: Say
) -> tuple[tuple[float, float], tuple[float, float], float | None, float]:
    """Returns the seconds of a prefill and a step, predicted and measured, others' share meanwhile, and the drift."""
    predicted, others = by.seconds(), timing.Others()
    measured = _measured_seconds(model, say)
    return predicted, measured, others.share(), by.drift()


def sizes(spec: spec_model.Model) -> tuple[int, int, int]:
    """Returns the tokens of a prefill, of the prompt before decoding, and the number of decode steps."""
    context = spec.max_positions
    return min(PREFILL, context), min(PROMPT, context // 2 or 1), min(STEPS, max(1, context // 4))


def _measured_seconds(model: Model, say: Say) -> tuple[float, float]:
    tokens, prompt, steps = sizes(model.spec)
    prefills, decodes = [], []
    for number in range(ROUNDS):
        say(f"prefill and decode, round {number + 1} of {ROUNDS}")
        prefills.append(run.prefill_seconds(model, tokens, PREFILLS))
        decodes.append(run.decode_seconds(model, prompt, steps))
    return lower_quartile(prefills), lower_quartile(decodes)


def _notes(drift: float, others: Mapping[str, float | None]) -> Iterator[str]:
    if drift > DRIFT:
        yield f"the machine's speed changed by a factor of {drift:.2f} while this was measured"
    for doing, share in others.items():
        if share is not None and share >= BUSY:
            yield f"other processes used {share:.0%} of the CPUs while {doing}"


def _row(figure: str, unit: str, predicted: float, measured: float, tolerance: float = 0.0) -> Row:
    return Row(figure=figure, unit=unit, predicted=predicted, measured=measured, tolerance=tolerance)
