"""How many transformer layers each stage holds. Layers are never dropped: counts sum to the total.

    32 layers, 4 stages                        8 8 8 8
    first rank 6, last rank 8                  6 9 9 8
    embedding and loss count as a layer, 30    7 8 8 7
    padding allowed, 30 layers                 7 8 8 7
    --num-layers-per-stage 9 9 9 5             9 9 9 5
    layout Et*8|t*8|t*9|t*7L                   8 8 9 7

Counts are in model order (stage 0 holds the embedding), whatever rank the stages are placed on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement


def split_layers(
    num_layers: int,
    placement: Placement,
    *,
    first_rank_layers: int | None = None,
    last_rank_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    per_stage: Sequence[int] | None = None,
    allow_padding: bool = False,
) -> tuple[int, ...]:
    """Layers of each stage, in model order.

    `first_rank_layers` and `last_rank_layers` fix what the first and the last pipeline rank hold
    over all their chunks. `per_stage` states every count. Raises ValueError, naming the numbers
    and what would work, for a split that is impossible or leaves a middle stage empty unasked.
    """
    if per_stage is not None:
        return _listed(num_layers, placement, per_stage)
    if first_rank_layers is not None or last_rank_layers is not None:
        return _around_fixed_ranks(num_layers, placement, first_rank_layers, last_rank_layers)
    extra = int(account_for_embedding) + int(account_for_loss)
    per, excess = divmod(num_layers + extra, placement.num_stages)
    if excess and not (allow_padding and extra == 0):
        raise ValueError(_indivisible(num_layers, placement, extra))
    counts = [per + bool(excess)] * placement.num_stages
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    if excess:
        for stage in _padding_order(placement)[: placement.num_stages - excess]:
            counts[stage] -= 1
    return _checked(num_layers, placement, counts)


def parse_layout(text: str) -> tuple[int, ...]:
    """Layers per stage of a `--pipeline-model-parallel-layout` string such as `Et*3|(tt|)*2,L`.

    E embedding, t layer, L loss; `|` separates stages, `x*n` and `(...)*n` repeat, commas are
    decoration. Raises ValueError for anything else, and unless E comes first and L last.
    """
    flat = _unroll(re.sub(r"[\s,]", "", text))
    unknown = sorted(set(flat) - set("EtL|"))
    if unknown:
        why = " (multi-token prediction layers are not supported)" if "m" in unknown else ""
        raise ValueError(
            f"--pipeline-model-parallel-layout {text!r}: {''.join(unknown)!r} is not understood"
            f"{why}; write stages of E, t and L separated by |"
        )
    symbols = flat.replace("|", "")
    if symbols.count("E") != 1 or symbols.count("L") != 1 or symbols[0] + symbols[-1] != "EL":
        raise ValueError(
            f"--pipeline-model-parallel-layout {text!r} must begin with the one E (embedding) and "
            "end with the one L (loss)"
        )
    pieces = flat.split("|")
    if "E" not in pieces[0] or "L" not in pieces[-1]:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text!r}: E belongs to the first stage and L to the "
            "last; move the | that cuts one of them off"
        )
    return tuple(piece.count("t") for piece in pieces)


def stage_offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Layers before each stage: stage s holds layers offset + 1 .. offset + count (1-based)."""
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def _unroll(text: str) -> str:
    """Write repetitions out, innermost first."""
    repeat = re.compile(r"(?:\(([^()]*)\)|([^()*\d]))\*(\d+)")
    while "*" in text:
        match = repeat.search(text)
        if match is None:
            raise ValueError(
                f"--pipeline-model-parallel-layout: cannot read a repetition in {text!r}; "
                "write t*3 or (tt|)*3"
            )
        body = match[1] if match[1] is not None else match[2]
        text = text[: match.start()] + body * int(match[3]) + text[match.end() :]
    if text.count("(") != text.count(")"):
        raise ValueError(
            f"--pipeline-model-parallel-layout: the parentheses of {text!r} do not pair"
        )
    return text.replace("(", "").replace(")", "")


def _listed(num_layers: int, placement: Placement, counts: Sequence[int]) -> tuple[int, ...]:
    given = " ".join(map(str, counts))
    if len(counts) != placement.num_stages or min(counts) < 0:
        raise ValueError(
            f"layers per stage {given}: {_grid(placement)} need {placement.num_stages} counts of "
            f"at least 0, {len(counts)} are given"
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"layers per stage {given} make {sum(counts)}, but --num-layers is {num_layers}; "
            "change one of them"
        )
    return tuple(counts)


def _around_fixed_ranks(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Given counts for the first and last rank; the other ranks share the rest evenly."""
    fixed: dict[int, int] = {}
    for flag, rank, count in (
        ("--decoder-first-pipeline-num-layers", 0, first),
        ("--decoder-last-pipeline-num-layers", placement.num_ranks - 1, last),
    ):
        if count is None:
            continue
        if count < 0 or fixed.get(rank, count) != count:
            raise ValueError(f"{flag} {count} cannot be met on {_grid(placement)}")
        fixed[rank] = count
    free = [rank for rank in range(placement.num_ranks) if rank not in fixed]
    left = num_layers - sum(fixed.values())
    if left < 0 or (left and not free) or (free and left % len(free)):
        stated = " and ".join(str(count) for count in fixed.values())
        raise ValueError(
            f"--num-layers {num_layers} minus {stated} on the first and last rank "
            f"(--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers) leaves "
            f"{left} layers for the {len(free)} ranks between; it must be a multiple of that, so "
            "change a count or state every stage with --num-layers-per-stage"
        )
    per_rank = {
        rank: fixed.get(rank, left // len(free) if free else 0)
        for rank in range(placement.num_ranks)
    }
    counts = []
    for stage in range(placement.num_stages):
        rank = placement.rank_of(stage)
        chunks = len(placement.stages_by_rank[rank])
        if per_rank[rank] % chunks:
            raise ValueError(
                f"pipeline rank {rank} would hold {per_rank[rank]} layers in {chunks} chunks; "
                f"each rank's count must be a multiple of {chunks}"
            )
        counts.append(per_rank[rank] // chunks)
    return _checked(num_layers, placement, counts)


def _padding_order(placement: Placement) -> list[int]:
    """Stages in the order in which padding takes a layer away: last, first, then onwards."""
    last = placement.last_stage
    return [last, *(stage for stage in range(last))]


def _checked(num_layers: int, placement: Placement, counts: Sequence[int]) -> tuple[int, ...]:
    """Counts in which only the stages with the embedding and the head may be empty."""
    assert sum(counts) == num_layers, f"{list(counts)} are not {num_layers} layers"
    ends = (0, placement.last_stage)
    empty = [s for s, n in enumerate(counts) if n < (s not in ends)]
    if empty:
        raise ValueError(
            f"--num-layers {num_layers} leaves stage {empty[0]} of {_grid(placement)} without a "
            "layer; use more layers or fewer stages, or ask for it with --num-layers-per-stage"
        )
    return tuple(counts)


def _indivisible(num_layers: int, placement: Placement, extra: int) -> str:
    stages = placement.num_stages
    below = (num_layers + extra) // stages * stages - extra
    fits = [n for n in (below, below + stages) if n >= 1]
    counted = f" plus {extra} for embedding and loss" if extra else ""
    padding = "" if extra else ", pass --allow-padding-num-layers"
    return (
        f"--num-layers {num_layers}{counted} does not divide into {_grid(placement)}; "
        f"use {' or '.join(map(str, fits))}{padding}, or give each stage its share with "
        "--num-layers-per-stage"
    )


def _grid(placement: Placement) -> str:
    """`8 stages`, or `4 ranks x 2 chunks = 8 stages`."""
    ranks, stages = placement.num_ranks, placement.num_stages
    if stages == ranks or stages % ranks:
        return f"{stages} stage{'s' if stages > 1 else ''}"
    return f"{ranks} rank{'s' if ranks > 1 else ''} x {stages // ranks} chunks = {stages} stages"
