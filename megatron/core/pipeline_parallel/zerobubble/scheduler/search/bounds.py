"""What no plan can beat: a lower bound on the cost, and the least memory a plan needs.

Every bound looks at one rank. Its first instruction is F of its first stage, micro-batch 0; its
first B is that of its last stage, micro-batch 0; its last F is that of its last stage, micro-batch
m - 1. (Micro-batches of a stage run in order, so these hold for every valid plan.)
"""

from __future__ import annotations

from collections.abc import Sequence

from .network import B, F, Network, W


def lower_bound(network: Network) -> float:
    """A cost that no valid plan within the limits goes below."""
    ranks = range(len(network.limits))
    return max(
        max(
            _work(network, rank) + _unavoidable_idle(network, rank),
            _through_bottlenecks(network, rank),
            _by_memory(network, rank),
        )
        + network.first_start[rank]
        - network.origin[rank]
        for rank in ranks
    )


def least_limits(network: Network) -> list[float]:
    """Per rank, the memory that running one micro-batch at a time needs: the least of all plans.

    One micro-batch is forwarded through all chunks; then, chunk by chunk, B is followed by W.
    """
    take, give = network.forward.take, network.forward.give
    least = []
    for held in network.placement.stages_by_rank:
        level = peak = sum(take[3 * s + F] for s in held)
        for s in sorted(held, reverse=True):
            level += give[3 * s + B]
            peak = max(peak, level)
            level += give[3 * s + W]
        least.append(peak)
    return least


def _work(network: Network, rank: int) -> float:
    duration = network.forward.duration
    return network.num_microbatches * sum(duration[lane] for lane in network.lanes_by_rank[rank])


def _stages(network: Network, rank: int) -> list[int]:
    return sorted(network.placement.stages_by_rank[rank])


def _path(network: Network, first: int, last: int, kind: int) -> float:
    """Time from the start of `kind` in one end of stages first .. last to its end in the other."""
    duration = network.forward.duration
    return sum(duration[3 * s + kind] for s in range(first, last + 1)) + sum(
        network.hop[first:last] if last > first else []
    )


def _hop(network: Network, stage: int) -> float:
    """Transfer time from `stage` to the next one; none behind the last."""
    return network.hop[stage] if 0 <= stage < len(network.hop) else 0.0


def _until_first_backward(network: Network, rank: int) -> float:
    """Least time from the rank's first start to its first B."""
    held, last = _stages(network, rank), network.placement.last_stage
    time = _path(network, held[0], last, F)
    if held[-1] < last:
        time += _path(network, held[-1] + 1, last, B) + _hop(network, held[-1])
    return time


def _after_last_forward(network: Network, rank: int) -> float:
    """Least time from the end of the rank's last F to its end."""
    held, last = _stages(network, rank), network.placement.last_stage
    time = _path(network, held[0], last, B)
    if held[-1] < last:
        time += _path(network, held[-1] + 1, last, F) + _hop(network, held[-1])
    return time + (network.forward.duration[3 * held[0] + W] if network.split else 0.0)


def _most_gain(items: Sequence[tuple[float, float]], limit: float, copies: int) -> float:
    """The most gain from up to `copies` of each (gain, size) within the limit; fractions allowed
    unless all sizes are equal."""
    sizes = {size for _, size in items}
    if len(sizes) == 1 and min(sizes) > 0:
        limit = int(limit / min(sizes) + 1e-6) * min(sizes)
    total = 0.0
    for gain, size in sorted(items, key=lambda item: -item[0] / max(item[1], 1e-12)):
        number = copies if size <= 0 else min(copies, limit / size)
        total += number * gain
        limit -= number * size
    return total


def _unavoidable_idle(network: Network, rank: int) -> float:
    """Idle time before the first B, when only F can run, as far as memory allows; and after the
    last F, when only what is in flight is left (arXiv:2401.10241, appendix B, and its mirror)."""
    ahead, limit, m = network.forward, network.limits[rank], network.num_microbatches
    held = _stages(network, rank)
    forwards = _most_gain(
        [(ahead.duration[3 * s + F], ahead.take[3 * s + F]) for s in held], limit, m
    )
    before = max(0.0, _until_first_backward(network, rank) - forwards)
    waiting = [(ahead.duration[3 * s + B], ahead.take[3 * s + F]) for s in held]
    if network.split:
        kept = [max(-ahead.give[3 * s + W], 0.0) for s in held]
        late = [ahead.duration[3 * s + W] for s in held]
        waiting = [(gain + w, size) for (gain, size), w in zip(waiting, late, strict=False)]
        waiting += list(zip(late, kept, strict=False))
    after = max(0.0, _after_last_forward(network, rank) - _most_gain(waiting, limit, m))
    all_forwards = m * sum(ahead.duration[3 * s + F] for s in held)
    # The two do not overlap if some F must wait for the first B.
    return before + after if forwards < all_forwards * (1 - 1e-9) else max(before, after)


def _through_bottlenecks(network: Network, rank: int) -> float:
    """The rank waits for a later rank to run all its F and B, on the way there and back."""
    ahead, m = network.forward, network.num_microbatches
    first = _stages(network, rank)[0]
    tail = ahead.duration[3 * first + W] if network.split else 0.0
    best = 0.0
    for other in range(len(network.limits)):
        held = _stages(network, other)
        if held[0] < first:
            continue
        there = _path(network, first, held[0] - 1, F) + _hop(network, held[0] - 1)
        back = _path(network, first, held[0] - 1, B) + _hop(network, held[0] - 1)
        if held[0] == first:
            there = back = 0.0
        busy = m * sum(ahead.duration[3 * s + F] + ahead.duration[3 * s + B] for s in held)
        best = max(best, there + busy + back + tail)
    return best


def _by_memory(network: Network, rank: int) -> float:
    """Memory times time: what micro-batches hold on their way cannot exceed the limit times the
    cost, less the corners in which memory fills up and empties."""
    ahead, last, m = network.forward, network.placement.last_stage, network.num_microbatches
    held = _stages(network, rank)
    limit = min(network.limits[rank], m * sum(ahead.take[3 * s + F] for s in held))
    area = fill = drain = largest = 0.0
    for s in held:
        take = ahead.take[3 * s + F]
        kept = -ahead.give[3 * s + W] if network.split else 0.0
        late = ahead.duration[3 * s + W] if network.split else 0.0
        area += take * (_path(network, s, last, F) + _path(network, s, last, B)) + kept * late
        largest = max(largest, take, kept)
        fill = max(fill, max(take, kept) / ahead.duration[3 * s + F])
        drain = max(drain, take / max(ahead.duration[3 * s + B] + late, 1e-12))
        drain = max(drain, kept / late if late > 0 else 0.0)
    if limit <= 0 or fill <= 0 or drain <= 0:
        return 0.0
    room = max(0.0, limit - largest)
    corners = room**2 / (2 * fill) + room**2 / (2 * drain)
    time = (m * area + corners) / limit
    # Corners that overlap would count some memory twice.
    return time if time >= room / fill + room / drain else m * area / limit
