"""Reads a table of the schedules that another scheduler plans, as cases for ours.

One row is one schedule under one set of times. The columns used, and what they mean:

    scheduler         the peer's name; PEER_SCHEDULES says which of ours it is held against
    p, m              ranks, micro-batches
    TF, TB, TW, Tc    one micro-batch through all layers of a rank; one transfer between ranks
    mem_limit         what the peer was told (shown, not used)
    makespan          its cost, which is our *longest span*
    peak_mem_max      the most memory of any rank; one micro-batch of a rank is 1 from its F to
                      the end of its W (of its fused backward), a chunk its share

A second table, optional, has one row per rank: the same key columns, and `rank` and `peak_mem`.
Without it our ranks may each hold what the peer's fullest rank holds; with it, rank r no more than
the peer's rank r.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.training.benchmarks.planner_cases import Case
from megatron.training.benchmarks.planner_paper import MODELS, PROFILES

TOLERANCE = 1e-6  # relative, for costs and for memory: the tables are rounded

# T_F of a profile that the table uses -> its model.
_MODEL_BY_FORWARD = {
    PROFILES[key].forward: key[0]
    for key in (("1.5B", 8, 24), ("6.2B", 8, 24), ("14.6B", 16, 48), ("28.3B", 32, 96))
}


class Ours(NamedTuple):
    """Our schedule for one of the peer's: same placement, same choice of split or fused backward
    (which differ in what they can reach)."""

    schedule: str
    num_chunks: int | None = None
    splits_memory: bool = False  # the peer's B frees part of the memory, as in the paper


def _v_by_limit(p: int, limit: str) -> Ours:
    """The V schedule whose own memory is nearest from below to what the peer was told."""
    number = float(limit)
    if number >= p:
        return Ours("zb-v")
    return Ours("v-half" if number >= (p + 2) // 2 else "v-min")


def _always(ours: Ours) -> Callable[[int, str], Ours]:
    return lambda p, limit: ours


# The peer's name -> ours, given p and the limit the peer was told.
PEER_SCHEDULES: Mapping[str, Callable[[int, str], Ours]] = {
    "1f1b": _always(Ours("1f1b")),
    "1f1b_v": _always(Ours("1f1b-v")),
    "interleaved_v2": _always(Ours("interleaved", 2)),
    "interleaved_v4": _always(Ours("interleaved", 4)),
    "group_interleaved_v2_gp": _always(Ours("zb-interleaved", 2)),
    "group_interleaved_v2_gp/2": _always(Ours("zb-interleaved", 2)),
    "group_interleaved_v4_gp": _always(Ours("zb-interleaved", 4)),
    "group_interleaved_v4_gp/2": _always(Ours("zb-interleaved", 4)),
    "zb": _always(Ours("zb")),
    "zb_papermem": _always(Ours("zb", splits_memory=True)),
    "zbv": _always(Ours("zb-v")),
    "handcrafted_zbv": _always(Ours("zb-v")),
    "zbv_greedy": lambda p, limit: Ours("v-half" if limit == "half" else "v-min"),
    "v_auto": _v_by_limit,
}

_KEY = ("scheduler", "p", "m", "TF", "TB", "TW", "Tc", "mem_limit")
_COLUMNS = (*_KEY, "makespan", "peak_mem_max")
_RANK_COLUMNS = (*_KEY, "rank", "peak_mem")

RankPeaks = Mapping[tuple[str, ...], Mapping[int, float]]


def load_peer_cases(
    path: str | pathlib.Path, ranks_path: str | pathlib.Path | None = None
) -> list[Case]:
    """The rows of a table as cases, in its order; `ranks_path` is the table of peaks per rank.

    Raises ScheduleError, naming file and line, for what it does not understand.
    """
    peaks = None if ranks_path is None else _load_rank_peaks(ranks_path)
    cases = []
    for where, row in _rows(path, _COLUMNS):
        try:
            cases.append(_case(row, peaks))
        except (ValueError, OverflowError) as error:  # a ScheduleError is a ValueError
            raise ScheduleError(f"{where}: {error}") from None
    if not cases:
        raise ScheduleError(f"{path} has no rows")
    return cases


def _rows(
    path: str | pathlib.Path, columns: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str]]]:
    """File and line, and the row, of a table that has at least these columns."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise ScheduleError(
                    f"{path} lacks the columns {', '.join(missing)}; give a table with "
                    f"{', '.join(columns)}"
                )
            for row in reader:
                where = f"{path} line {reader.line_num}"
                if any(row[name] is None for name in columns):
                    raise ScheduleError(f"{where}: the row has fewer columns than the first line")
                yield where, row
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path} cannot be read: it is not text") from None


def _load_rank_peaks(path: str | pathlib.Path) -> dict[tuple[str, ...], dict[int, float]]:
    peaks: dict[tuple[str, ...], dict[int, float]] = {}
    for where, row in _rows(path, _RANK_COLUMNS):
        try:
            held = peaks.setdefault(tuple(row[name] for name in _KEY), {})
            held[int(row["rank"])] = _number(row, "peak_mem")
        except ValueError as error:
            raise ScheduleError(f"{where}: {error}") from None
    return peaks


def _case(row: Mapping[str, str], peaks: RankPeaks | None) -> Case:
    if row["scheduler"] not in PEER_SCHEDULES:
        raise ScheduleError(
            f"no schedule of ours is held against {row['scheduler']!r}; "
            f"known are {', '.join(PEER_SCHEDULES)}"
        )
    p = int(row["p"])
    ours = PEER_SCHEDULES[row["scheduler"]](p, row["mem_limit"])
    limits = (_number(row, "peak_mem_max"),) * p
    if peaks is not None:
        held = peaks.get(tuple(row[name] for name in _KEY), {})
        if sorted(held) != list(range(p)):
            raise ScheduleError(f"the table per rank has ranks {sorted(held)} of {p} for this row")
        limits = tuple(held[rank] for rank in range(p))
    forward = _number(row, "TF")
    return Case(
        name=row["scheduler"],
        schedule=ours.schedule,
        num_ranks=p,
        num_microbatches=int(row["m"]),
        num_chunks=ours.num_chunks,
        costs=EqualRanks(
            forward=forward,
            input_grad=_number(row, "TB"),
            weight_grad=_number(row, "TW"),
            transfer=_number(row, "Tc"),
            held_b_to_w=_held_b_to_w(forward) if ours.splits_memory else 1.0,
        ),
        memory_limits=tuple(limit * (1 + TOLERANCE) for limit in limits),
        stated_limit=row["mem_limit"],
        cost=_number(row, "makespan"),
        tolerance=TOLERANCE,
    )


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{name} is {row[name]!r}; it must be a number from 0")
    return value


def _held_b_to_w(forward: float) -> float:
    """M_W / M_B of the model whose profile has this T_F."""
    if forward not in _MODEL_BY_FORWARD:
        known = ", ".join(map(str, _MODEL_BY_FORWARD))
        raise ScheduleError(f"no model has TF {forward:g}; zb_papermem is known for {known}")
    return MODELS[_MODEL_BY_FORWARD[forward]].share_kept_for_w
