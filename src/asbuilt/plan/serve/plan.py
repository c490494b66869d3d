"""A serving plan: its answers, as one typed result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asbuilt.catalog.machine import Machine
from asbuilt.plan import render
from asbuilt.plan.explain import explain
from asbuilt.plan.lines import Line
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision
from asbuilt.plan.serve import answers, commands, formats, limits, money, report
from asbuilt.plan.serve.answers import Alternative, Caches, Decode, Prefill
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.disaggregate import Balance, Disaggregated, Pool
from asbuilt.plan.serve.expected import LEVELS, Level
from asbuilt.plan.serve.expert_loads import Experts
from asbuilt.plan.serve.host_cache import HostCache
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.search import Found, search
from asbuilt.plan.serve.workload import Served, Workload
from asbuilt.plan.suggestion import Suggestion

SWEEP = tuple(2**i for i in range(11))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The validated question; `users` None means as many as fit."""

    name: str
    context: int
    users: int | None
    goal: limits.Goal
    workload: Workload | None = None
    price: money.Price | None = None
    gpus: int | None = None
    kv_host: float | None = None
    pools: tuple[Pool, Pool] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ServePlan:
    """A serving plan; `document` returns it as plain data, `tables` as tables, `explain` as a derivation.

    `users` are those that fit and are served within the targets, `users_that_fit` those that memory alone allows.
    `refused` lists (path, part, figure, reason) for what cannot be planned; those figures are None. Answers to further
    questions (limits, sweep, suggestions) are computed on first use.
    """

    asked: Asked
    roofline: Roofline
    fits: bool
    ladder: tuple[Line, ...]
    counted: tuple[Line, ...]
    weight_bytes: int
    kv_budget_bytes: int
    cache_tokens: int | None
    users: int | None
    users_that_fit: int | None
    prefill: Prefill
    decode: Decode | None
    targets: dict[str, bool]
    warnings: tuple[str, ...]
    refused: tuple[tuple[str, str, str, str], ...]
    served: dict[Level, Served | None] | None = None
    """How the workload is served, with low, middle and high efficiencies; None where its sequences do not fit."""
    host_cache: HostCache | None = None
    """The second cache, in host memory."""
    experts: Experts | None = None
    """Replicas of routed experts, and the load of the busiest device."""
    disaggregated: Disaggregated | None = None
    """Both pools, where prompts are computed by other devices; capacity, layout and users are those of the others."""

    @property
    def capacity(self) -> Capacity:
        """The capacity of the placement."""
        return self.roofline.capacity

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self.capacity.machine

    @property
    def layout(self) -> Placement:
        """The placement of the model on devices."""
        return self.capacity.layout

    @property
    def precision(self) -> Precision:
        """The format of the weights."""
        return self.capacity.precision

    @property
    def conventions(self) -> Conventions:
        """The switches."""
        return self.capacity.conventions

    @property
    def context(self) -> int:
        """Tokens per sequence."""
        return self.asked.context

    @property
    def wanted(self) -> int:
        """The number of users asked for, 1 by default."""
        return self.asked.goal.users

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.layout.gpus if self.disaggregated is None else self.disaggregated.gpus

    @cached_property
    def balances(self) -> dict[Level, Balance] | None:
        """The balance of the pools by level; None with one pool, without a workload, and where nothing fits."""
        pools, workload = self.disaggregated, self.asked.workload
        if pools is None or workload is None or not self.users:
            return None
        return {level: pools.balance(self.roofline.at(level), workload, self.users) for level in LEVELS}

    @cached_property
    def largest_context(self) -> int | None:
        """The largest context, within the model's, at which the users fit within the targets."""
        if self.users is None:
            return None
        return limits.largest_context(self.roofline, self.asked.goal, self.capacity.spec.max_positions)

    @property
    def largest_batch(self) -> int | None:
        """The largest number of sequences that fit and are served within the targets."""
        return self.users

    @cached_property
    def smallest_count(self) -> int | None:
        """The smallest number of this machine, of those tried, on which the users fit within the targets."""
        if self.users is None or self.disaggregated is not None:
            return None
        return limits.smallest_count(self.roofline, self.asked.goal, self.context)

    @cached_property
    def layouts(self) -> tuple[Found, ...]:
        """The layouts of this machine that meet the goal, the one with the fewest devices first."""
        return () if self.users is None else search(self.roofline, self.asked.goal, self.context, gpus=self.asked.gpus)

    @cached_property
    def smallest_card(self) -> str | None:
        """The name of the card with the least memory that alone serves the users within the targets."""
        return None if self._card is None else self._card.name

    @cached_property
    def _card(self) -> Machine | None:
        if self.users is None or self.disaggregated is not None:
            return None
        return limits.smallest_card(self.roofline, self.asked.goal, self.context)

    @cached_property
    def caches(self) -> Caches | None:
        """The three cache numbers."""
        return None if self.users is None else answers.caches(self.capacity, self.context)

    @cached_property
    def expected(self) -> dict[Level, tuple[float, float | None]]:
        """Seconds to the first token and of a step, with low, middle and high efficiencies; the slowest first."""
        found: dict[Level, tuple[float, float | None]] = {}
        for level in LEVELS:
            at = self.roofline.at(level)
            step = None if self.decode is None else at.decode(self.decode.batch, self.context).seconds
            found[level] = at.first_token(self.prefill.prompt), step
        return found

    @cached_property
    def costs(self) -> dict[Level, money.Cost] | None:
        """What the devices cost by level of efficiency; None without a price, and where the workload does not fit.

        Without a workload the tokens are those of prompts alone and of full steps alone.
        """
        price, found = self.asked.price, {}
        if price is None:
            return None
        prefiller = self.roofline.prefiller or self.roofline
        inputs = prefiller.capacity.layout.copies * self.prefill.prompt
        for level, (_, step) in self.expected.items():
            served = None if self.served is None else self.served[level]
            if served is not None:
                found[level] = money.of_workload(price, self.gpus, served)
            elif self.served is None:
                outputs = None if step is None or self.decode is None else self.decode.batch / step
                read = inputs / prefiller.at(level).prefill(self.prefill.prompt).seconds
                pools = prefiller.capacity.layout.gpus, self.layout.gpus
                found[level] = money.of_rates(price, self.gpus, read, outputs, pools)
        return found or None

    @cached_property
    def by_format(self) -> tuple[formats.Row, ...]:
        """Users and memory by format of weights and cache."""
        return () if self.users is None else tuple(formats.rows(self.capacity, self.context))

    @cached_property
    def sweep(self) -> tuple[Decode, ...]:
        """Decode steps at growing batch sizes."""
        return (
            () if self.users is None else tuple(answers.decode(self.roofline, batch, self.context) for batch in SWEEP)
        )

    @cached_property
    def knee(self) -> int | None:
        """The smallest batch that is compute-bound, None if every batch is memory-bound."""
        return None if self.users is None else self.roofline.knee(self.context)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What to change if the users do not fit within the targets, best first."""
        if self.users is None or self.fits:
            return ()
        goal, count = self.asked.goal, self.smallest_count
        return limits.suggest(self.roofline, goal, self.context, count=count, card=self._card)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The answers with other conventions, if different."""
        if self.decode is None:
            return ()
        return answers.alternatives(self.roofline, self.asked.goal, self.context, self.users or 0, self.decode)

    @property
    def command(self) -> str:
        """The command line that starts the engine with the plan's values, "" where there is none."""
        return commands.command(self)

    def document(self) -> dict[str, Any]:
        """Returns the plan as plain data, whose keys are never removed."""
        return report.document(self)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Every figure with its derivation, in logical order."""
        return (*self.ladder, *self.counted, *report.time_lines(self))

    def explain(self) -> str:
        """Returns every formula with its numbers."""
        return "\n".join(explain(self.lines))

    def tables(self) -> list[render.Table]:
        """Returns the plan as tables."""
        return report.tables(self)

    def markdown(self) -> str:
        """Returns the tables as Markdown."""
        return render.markdown(self.tables())

    def _repr_html_(self) -> str:
        return render.html(self.tables())

    @property
    def title(self) -> str:
        """The question in one line."""
        layout = self.layout
        pools = self.disaggregated
        if pools is not None:
            both = (pools.prefiller.capacity.layout, layout)
            said = (f"{one.gpus} (tp {one.tp}, pp {one.pp}, ep {one.ep})" for one in both)
            where = f"{self.machine.name}, {' to prefill and '.join(said)} to decode"
            return f"{self.asked.name} in {self.precision.name} on {where}, {self.context:,} tokens"
        many = f"{layout.gpus} x " if layout.gpus > 1 else ""
        how = f" (tp {layout.tp}, pp {layout.pp}, ep {layout.ep})" if layout.gpus > 1 else ""
        return (
            f"{self.asked.name} in {self.precision.name} on {many}{self.machine.name}{how}, "
            f"{self.context:,} tokens, cache in {self.capacity.kv_dtype}"
        )
