"""Recompute: keep a function's inputs alone and run its forward a second time inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.checkpoint import checkpoint

from megatron.core.keyed_random import RandomContext


class Unit(NamedTuple):
    """Layers start .. stop - 1 of a stage, which run as one piece."""

    start: int
    stop: int
    recompute: bool


def plan_units(num_layers: int, method: str | None, size: int | None) -> list[Unit]:
    """How a stage of `num_layers` layers is cut for full recompute.

    uniform: pieces of `size` layers, all recomputed; block: the first `size` layers, each on its
    own, and the rest kept; None: nothing is recomputed.
    """
    if method == "uniform":
        assert size, "checked by the config"
        starts = range(0, num_layers, size)
        return [Unit(start, min(start + size, num_layers), True) for start in starts]
    recomputed_layers = min(size or 0, num_layers) if method == "block" else 0
    return [Unit(i, i + 1, i < recomputed_layers) for i in range(num_layers)]


def recomputed(function: Callable[..., Any], random: RandomContext, *inputs: Any) -> Any:
    """`function(*inputs)`, run again in backward at the place in training where it first ran.

    Dropout is keyed by that place, so the second run draws the same masks and torch need not keep
    generator states.
    """
    place = (random.iteration, random.microbatch)

    def at_its_place(*inputs: Any) -> Any:
        now = (random.iteration, random.microbatch)
        random.iteration, random.microbatch = place
        try:
            return function(*inputs)
        finally:
            random.iteration, random.microbatch = now

    return checkpoint(at_its_place, *inputs, use_reentrant=False, preserve_rng_state=False)
