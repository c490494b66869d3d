"""What a serving plan warns of: a context beyond the model's, rates a machine lacks, links, graphs, several nodes."""

from __future__ import annotations

from collections.abc import Iterator

from asbuilt.plan.network import unlinked
from asbuilt.plan.serve.roofline import Roofline


def warnings(roofline: Roofline, context: int) -> Iterator[str]:
    """Yields the warnings about sequences of `context` tokens."""
    capacity = roofline.capacity
    if context > capacity.spec.max_positions:
        yield (
            f"{context:,} tokens exceed the model's context of {capacity.spec.max_positions:,}: "
            "the costs are right, but the model's output there is unreliable"
        )
    for (_, used), wanted in zip(
        roofline.rates, (capacity.precision.compute, capacity.precision.activation), strict=True
    ):
        if used != wanted:
            yield f"{capacity.machine.name} has no {wanted} rate: products run at its {used} rate"
    if capacity.layout.per_copy > 1 and capacity.machine.link is None:
        yield unlinked(capacity.machine)
    if not capacity.engine.describes(capacity.machine):
        known = " and ".join(capacity.engine.vendors)
        where = f"on {capacity.machine.name} it may differ"
        yield f"the memory that {capacity.engine.title} takes is known of {known} devices: {where}"
    if capacity.graphs > capacity.reserve_left(context):
        yield (
            f"{capacity.engine.title} captures CUDA graphs of about {capacity.graphs / 2**30:.2f} GiB after "
            "allocating the cache, more than the utilisation leaves: lower it"
        )
    yield from _across_nodes(roofline)
    if roofline.prefiller is not None:
        yield from (f"prefill: {warning}" for warning in warnings(roofline.prefiller, context))


def _across_nodes(roofline: Roofline) -> Iterator[str]:
    layout, network = roofline.capacity.layout, roofline.network
    wide, speed = layout.wide, f"{network.between / 1e9:g} GB/s a device (--node, --network)"
    if not network.inside(wide, 1):
        yield f"{wide} devices share each layer across several nodes of {network.node}: the network has {speed}"
    elif not network.inside(layout.pp, wide):
        yield f"pipeline stages span several nodes of {network.node}: the network has {speed}"
