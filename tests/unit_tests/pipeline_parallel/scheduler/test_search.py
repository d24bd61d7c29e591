"""The search for plans: within limits, never behind 1F1B or hand-made orders, the same each time.

"Searched" schedules are made for the request's costs and limits; published figures that they must
reach are in test_search_published.py and test_search_closed_forms.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from brute_force import is_complete, runs_to_the_end
from hypothesis import given, settings
from hypothesis import strategies as st
from published_orders import v_half_block, v_min_block, zb_v_by_hand

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.memory import peak_memory
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import lower
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import (
    EqualRanks,
    ModelCosts,
    StageCosts,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.search.bounds import lower_bound
from megatron.core.pipeline_parallel.zerobubble.scheduler.search.justify import (
    cost_of,
    retime,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.search.network import Network, peaks
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import (
    Objective,
    Timeline,
    evaluate,
    simulate,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

SEARCHED = [name for name, schedule in SCHEDULES.items() if schedule.searches]
SPLIT = [name for name in SEARCHED if SCHEDULES[name].splits_backward]
OBJECTIVES: tuple[Objective, Objective] = ("span", "makespan")

EQUAL = EqualRanks(forward=2.0, input_grad=2.0, weight_grad=2.0)  # a pass of a chunk takes 1
GPT = EqualRanks(forward=11.347, input_grad=11.248, weight_grad=8.132, transfer=0.377)
LONG_B = EqualRanks(forward=1.0, input_grad=1.7, weight_grad=0.8, transfer=0.1)

every_searched = pytest.mark.parametrize("name", SEARCHED)
both_objectives = pytest.mark.parametrize("objective", OBJECTIVES)


def uneven(num_ranks: int, end: int, model: EqualRanks = GPT) -> StageCosts:
    """A model whose first (end 0) or last (end -1) rank takes 1.5 times as long as the others."""
    times = {name: getattr(model, name) for name in ("forward", "input_grad", "weight_grad")}
    part = {name: 0.5 * value for name, value in times.items()}
    lists = {name: [value] * num_ranks for name, value in times.items()}
    for name, values in lists.items():
        values[end] += part[name]
    return StageCosts(
        lists={name: tuple(values) for name, values in lists.items()},
        transfer=model.transfer,
        embedding=part if end == 0 else {},
        head=part if end == -1 else {},
    )


def answer(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    model: ModelCosts,
    *,
    limits: Sequence[float] | None = None,
    objective: Objective = "span",
) -> Timeline:
    """The timeline of the plan, which is proven valid, complete and within the limits."""
    costs = model.cut(SCHEDULES[name].placement_for(num_ranks))
    request = PlanRequest(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limits=None if limits is None else tuple(limits),
        objective=objective,
    )
    plan = plan_schedule(name, request)
    validate(plan, costs=costs, memory_limits=limits, training=True)
    assert is_complete(plan) and runs_to_the_end(plan)
    return simulate(plan, costs)


# ---- what the search believes is what the simulator finds ------------------


@every_searched
@both_objectives
def test_search_and_simulator_agree(name: str, objective: Objective) -> None:
    """On the cost and on every rank's peak; and no plan beats the lower bound."""
    for num_ranks, num_microbatches, model in ((4, 9, GPT), (3, 2, uneven(3, -1))):
        timeline = answer(name, num_ranks, num_microbatches, model, objective=objective)
        network = Network(
            timeline.plan.placement,
            timeline.costs,
            num_microbatches,
            SCHEDULES[name].splits_backward,
            timeline.peaks,
            objective,
        )
        orders = network.orders_of(timeline.plan)
        believed = cost_of(network, retime(network, orders))
        assert believed == pytest.approx(timeline.cost(objective), rel=1e-12)
        assert peaks(network, orders) == pytest.approx(timeline.peaks, rel=1e-12)
        assert lower_bound(network) <= timeline.cost(objective) * (1 + 1e-9)


@both_objectives
@pytest.mark.parametrize("size", [(2, 5), (3, 4), (4, 8), (6, 18)], ids=str)
@pytest.mark.parametrize("held", [1.0, 2 / 3, 0.5])
def test_the_bound_lies_below_plans_that_reach_it(
    size: tuple[int, int], held: float, objective: Objective
) -> None:
    """Plain placement, equal times: the bound is exact, so a wrong one would show."""
    num_ranks, num_microbatches = size
    limit = max(1, round(held * num_ranks))
    timeline = answer(
        "zb", num_ranks, num_microbatches, EQUAL, limits=[limit] * num_ranks, objective=objective
    )
    network = Network(
        timeline.plan.placement,
        timeline.costs,
        num_microbatches,
        True,
        (float(limit),) * num_ranks,
        objective,
    )
    assert lower_bound(network) <= timeline.cost(objective) * (1 + 1e-9)
    if held == 1.0:
        assert lower_bound(network) == pytest.approx(timeline.cost(objective))


@pytest.mark.parametrize("name", ["zb", "zb-v"])
def test_the_bound_with_more_memory_than_there_are_microbatches(name: str) -> None:
    """Memory that m micro-batches cannot fill must not count."""
    for num_ranks, num_microbatches in ((1, 1), (2, 2), (4, 2), (4, 8)):
        timelines = [
            answer(name, num_ranks, num_microbatches, EQUAL, limits=[limit] * num_ranks)
            for limit in (num_ranks, 4 * num_ranks, 100.0)
        ]
        for limit, timeline in zip((num_ranks, 4 * num_ranks, 100.0), timelines, strict=True):
            network = Network(
                timeline.plan.placement,
                timeline.costs,
                num_microbatches,
                True,
                (float(limit),) * num_ranks,
                "span",
            )
            assert lower_bound(network) <= timeline.longest_span * (1 + 1e-9), (num_ranks, limit)


# ---- limits ----------------------------------------------------------------


@every_searched
@pytest.mark.parametrize(
    "limits",
    [(4.0, 3.0, 2.0, 2.0), (2.0, 2.5, 3.0, 4.0), (2.0, 4.0, 2.25, 3.0)],
    ids=str,
)
def test_limits_per_rank_are_kept(name: str, limits: tuple[float, ...]) -> None:
    """Also uneven ones, and with memory that B frees in part."""
    least = 3.0 if name == "1f1b-v" else 0.0  # below that no order of its pattern exists
    limits = tuple(max(limit, least) for limit in limits)
    half_freed = EqualRanks(forward=1.0, input_grad=1.2, weight_grad=0.7, held_b_to_w=0.4)
    for num_microbatches, model in ((3, half_freed), (10, uneven(4, -1))):
        timeline = answer(name, 4, num_microbatches, model, limits=limits)
        for peak, limit in zip(timeline.peaks, limits, strict=True):
            assert peak <= limit * (1 + 1e-9)


@pytest.mark.parametrize("name", SPLIT)
def test_more_memory_never_costs_time(name: str) -> None:
    spans = [
        answer(name, 4, 6, GPT, limits=[limit] * 4).longest_span for limit in (1.5, 2, 3, 4, 8)
    ]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("name", SPLIT)
def test_one_microbatch_at_a_time_is_enough_memory(name: str) -> None:
    """The least limit of all: what one micro-batch holds on its way through the rank."""
    limits = [1.0, 1.0, 1.0]
    assert max(answer(name, 3, 5, GPT, limits=limits).peaks) <= 1 + 1e-9


@every_searched
def test_limits_below_the_least_are_refused_in_one_sentence(name: str) -> None:
    costs = GPT.cut(SCHEDULES[name].placement_for(3))
    request = PlanRequest(
        num_ranks=3, num_microbatches=5, costs=costs, memory_limits=(9.0, 0.45, 9.0)
    )
    with pytest.raises(ScheduleError, match=rf"\b{name}\b") as caught:
        plan_schedule(name, request)
    message = str(caught.value)
    assert "rank 1" in message and "0.45" in message and "raise the limit" in message
    assert "\n" not in message and ". " not in message


# ---- never behind 1F1B -----------------------------------------------------


@both_objectives
@pytest.mark.parametrize("end", [0, -1], ids=["first", "last"])
def test_uneven_stages_and_few_microbatches(end: int, objective: Objective) -> None:
    """zb in 1F1B's own memory, rank by rank; zb-v in that of its first rank."""
    for num_ranks, counts in ((2, (1, 3)), (4, (1, 4, 9)), (7, (3,))):
        for m in counts:
            model = uneven(num_ranks, end)
            basic = answer("1f1b", num_ranks, m, model)
            tightest = answer("zb", num_ranks, m, model, limits=basic.peaks, objective=objective)
            assert tightest.cost(objective) <= basic.cost(objective) * (1 + 1e-9), (num_ranks, m)
            limits = [max(basic.peaks)] * num_ranks
            on_a_v = answer("zb-v", num_ranks, m, model, limits=limits, objective=objective)
            assert on_a_v.cost(objective) <= basic.cost(objective) * (1 + 1e-9), (num_ranks, m)


# ---- never behind hand-made orders of the same placement -------------------


def split(plan: Plan) -> Plan:
    """Each BW as B and, right behind it, W."""
    programs = [
        [
            Instruction(op, i.stage, i.microbatch)
            for i in program
            for op in ((Op.B, Op.W) if i.op is Op.BW else (i.op,))
        ]
        for program in plan.programs
    ]
    return Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs)


def planned(name: str) -> Callable[[int, int], Plan]:
    """The library's planner of that name, without costs and limits, as a maker of split orders."""

    def make(num_ranks: int, num_microbatches: int) -> Plan:
        request = PlanRequest(num_ranks=num_ranks, num_microbatches=num_microbatches)
        return split(plan_schedule(name, request))

    return make


@pytest.mark.parametrize("model", [EQUAL, GPT], ids=["equal", "gpt"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("zb", planned("1f1b")),
        ("zb", planned("zb-h1")),
        ("zb", planned("zb-h2")),
        ("zb-v", zb_v_by_hand),
        ("zb-v", planned("dualpipe-v")),
        ("zb-v", planned("1f1b-v")),
        ("v-half", v_half_block),
        ("v-min", v_min_block),
    ],
    ids=["1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "1f1b-v", "v-half", "v-min"],
)
def test_hand_made_orders_are_never_better(
    name: str, make: Callable[[int, int], Plan], model: EqualRanks
) -> None:
    """At the peak of the order's fullest rank, for both costs (the longest span on 10 ranks)."""
    for num_ranks, num_microbatches in ((3, 2), (4, 4), (10, 20)):
        plan = make(num_ranks, num_microbatches)
        costs = model.cut(plan.placement)
        validate(plan)
        limits = [max(peak_memory(plan, costs))] * num_ranks
        theirs = evaluate(plan, costs)
        for objective in OBJECTIVES[: 1 if num_ranks == 10 else 2]:
            ours = answer(
                name, num_ranks, num_microbatches, model, limits=limits, objective=objective
            )
            most = theirs.longest_span if objective == "span" else theirs.makespan
            assert ours.cost(objective) <= most * (1 + 1e-9), (num_ranks, objective)


def test_zb_is_never_behind_zb_h1_with_dyadic_times() -> None:
    """The hand-made order is best here; it must not be lost on the way."""
    model = EqualRanks(forward=2.5, input_grad=2.0, weight_grad=1.5)
    for num_ranks, num_microbatches in ((12, 24), (16, 32)):
        best = answer("zb-h1", num_ranks, num_microbatches, model).longest_span
        assert answer("zb", num_ranks, num_microbatches, model).longest_span <= best


# ---- and always ------------------------------------------------------------


@every_searched
def test_the_same_request_gives_the_same_plan(name: str) -> None:
    """Also where a small plan is extended to many micro-batches."""
    for num_microbatches in (5, 120):
        first, second = (answer(name, 4, num_microbatches, GPT).plan for _ in range(2))
        assert first == second


@every_searched
@both_objectives
def test_the_objective_is_what_is_made_small(name: str, objective: Objective) -> None:
    """Asking for the other cost never gives a better plan by this one's measure."""
    other = OBJECTIVES[1 - OBJECTIVES.index(objective)]
    asked = answer(name, 4, 8, LONG_B, objective=objective).cost(objective)
    assert asked <= answer(name, 4, 8, LONG_B, objective=other).cost(objective) * (1 + 1e-9)


positive = st.floats(0.05, 4.0)
share = st.floats(0.0, 1.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, int, Costs, tuple[float, ...]]:
    """A searched schedule, m, costs of unequal stages, and limits from the least that works up."""
    name = draw(st.sampled_from(SPLIT))
    num_ranks = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 6))
    placement = SCHEDULES[name].placement_for(num_ranks)

    def per_stage(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(values) for _ in range(placement.num_stages))

    held = per_stage(positive)
    costs = Costs(
        forward=per_stage(positive),
        input_grad=per_stage(st.floats(0.0, 4.0)),
        weight_grad=per_stage(st.floats(0.0, 4.0)),
        transfer=draw(st.floats(0.0, 2.0)),
        held_f_to_b=held,
        held_b_to_w=tuple(h * s for h, s in zip(held, per_stage(share), strict=True)),
    )
    limits = tuple(
        sum(held[stage] for stage in stages) * draw(st.floats(1.0, 4.0))
        for stages in placement.stages_by_rank
    )
    return name, num_microbatches, costs, limits


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=problems(), objective=st.sampled_from(OBJECTIVES))
def test_any_costs_and_limits(
    problem: tuple[str, int, Costs, tuple[float, ...]], objective: Objective
) -> None:
    """Valid, complete, within the limits of every rank, and above the bound."""
    name, num_microbatches, costs, limits = problem
    request = PlanRequest(
        num_ranks=len(limits),
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limits=limits,
        objective=objective,
    )
    plan = plan_schedule(name, request)
    validate(plan, costs=costs, memory_limits=limits, training=True)
    assert is_complete(plan) and runs_to_the_end(plan)
    network = Network(plan.placement, costs, num_microbatches, True, limits, objective)
    assert lower_bound(network) <= simulate(plan, costs).cost(objective) * (1 + 1e-9)


# ---- speed -----------------------------------------------------------------


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The least CPU time of some repeats: other work on the machine only ever adds."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("name", SCHEDULES)
def test_planning_takes_few_simulator_passes(name: str) -> None:
    """Planning, validation and communication pass, as a ratio to one pass of the simulator over
    the plan. One limit for both sizes: all of it is linear in the plan."""
    most = 500 if SCHEDULES[name].searches else 60
    for num_ranks, num_microbatches in ((6, 36), (10, 80)):
        costs = GPT.cut(SCHEDULES[name].placement_for(num_ranks))
        request = PlanRequest(num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
        plan = plan_schedule(name, request)
        one_pass = seconds(partial(simulate, plan, costs), repeats=5)
        taken = seconds(partial(plan_and_lower, name, request, costs), repeats=1)
        if taken > most * one_pass:  # other work came between
            taken = seconds(partial(plan_and_lower, name, request, costs), repeats=3)
        assert taken <= most * one_pass


def plan_and_lower(name: str, request: PlanRequest, costs: Costs) -> None:
    plan = plan_schedule(name, request)
    validate(plan, costs=costs, training=True)
    lower(plan)


def test_placements_searched_are_the_registered_ones() -> None:
    """Nothing above was left out by accident."""
    assert SEARCHED == ["zb", "zb-v", "v-half", "v-min", "1f1b-v", "zb-interleaved"]
    assert [name for name in SEARCHED if name != "1f1b-v"] == SPLIT
    assert Placement.v_shape(4) == SCHEDULES["zb-v"].placement_for(4)
