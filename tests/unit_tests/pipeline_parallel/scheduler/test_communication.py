"""The communication pass: every message sent once, received once, in one order, in time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from brute_force import RandomPlans, done_by, required

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    Channel,
    Message,
    RankProgram,
    all_channels,
    lower,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.planners.no_pipeline import (
    plan_forward_only,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate

LETTER = {"act": "F", "grad": "B"}  # what brute_force.py calls the maker of a value


def random_plan(seed: int) -> Plan:
    plans = RandomPlans(random.Random(seed))
    return plans.plan(plans.placement(), plans.rng.randint(1, 6), 0.5)


def sent_on(programs: tuple[RankProgram, ...]) -> dict[Channel, list[Message]]:
    streams: dict[Channel, list[Message]] = {}
    for program in programs:
        for step in program.steps:
            for message in step.sends:
                assert message.channel.source == program.rank != message.channel.target
                streams.setdefault(message.channel, []).append(message)
    return streams


def check(plan: Plan, look_ahead: int) -> None:
    """The contract of the pass, from the outside."""
    programs = lower(plan, look_ahead=look_ahead)
    rank_of = [slot.rank for slot in plan.placement.slots]
    streams = sent_on(programs)
    for program in programs:
        assert tuple(step.instruction for step in program.steps) == plan.programs[program.rank]
        posted: dict[Channel, list[Message]] = {}
        waited: Counter[Message] = Counter()
        for step in program.steps:
            for message in step.post:
                assert message.channel.target == program.rank
                posted.setdefault(message.channel, []).append(message)
            waits = {(LETTER[m.value.kind], *m.value[1:]) for m in step.waits}
            needs = required(step.instruction, plan.placement)
            assert waits == {key for key in needs if rank_of[key[1]] != program.rank}
            for message in step.waits:
                assert message in posted[message.channel]
                waited[message] += 1
            made = set(done_by(step.instruction))
            assert {(LETTER[m.value.kind], *m.value[1:]) for m in step.sends} <= made
        incoming = {c: s for c, s in streams.items() if c.target == program.rank}
        assert posted == incoming  # one to one and in the sender's order
        assert waited == Counter(m for stream in incoming.values() for m in stream)
        used = {c for c in streams if program.rank in (c.source, c.target)}
        assert program.channels == tuple(sorted(used))
    assert all_channels(programs) == tuple(sorted(streams))


@pytest.mark.parametrize("seed", range(40))
def test_contract_on_random_plans(seed: int) -> None:
    check(random_plan(seed), look_ahead=seed % 4)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (3, 7), (4, 4)])
def test_contract_on_every_schedule(name: str, ranks: int, microbatches: int) -> None:
    request = PlanRequest(num_ranks=ranks, num_microbatches=microbatches)
    check(plan_schedule(name, request), look_ahead=2)


@pytest.mark.parametrize("placement", [Placement.looped(3, 2), Placement.v_shape(3)])
def test_contract_on_evaluation_plans(placement: Placement) -> None:
    plan = plan_forward_only(placement, 5)
    check(plan, look_ahead=1)
    assert {channel.kind for channel in all_channels(lower(plan))} == {"act"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_receives_are_posted_ahead_but_not_too_far(seed: int, look_ahead: int) -> None:
    """At any step: the messages needed so far and at most `look_ahead` more, channel by channel."""
    plan = random_plan(seed)
    programs = lower(plan, look_ahead=look_ahead)
    streams = sent_on(programs)
    for program in programs:
        posted: Counter[Channel] = Counter()
        needed: Counter[Channel] = Counter()
        for step in program.steps:
            for message in step.waits:
                place = streams[message.channel].index(message)
                needed[message.channel] = max(needed[message.channel], place + 1)
            posted.update(message.channel for message in step.post)
            for channel, stream in streams.items():
                if channel.target == program.rank:
                    expected = min(len(stream), needed[channel] + look_ahead)
                    assert posted[channel] == expected


@pytest.mark.parametrize("seed", range(10))
def test_messages_are_those_the_simulator_counts(seed: int) -> None:
    plan = random_plan(seed)
    counted = simulate(plan, Costs.uniform(plan.placement)).messages_sent
    assert tuple(program.num_messages_sent for program in lower(plan)) == counted


def test_two_ranks_have_a_channel_per_direction_and_kind() -> None:
    """With p = 2 and two chunks, both neighbours of a rank are one rank: kinds keep them apart."""
    plan = plan_schedule("interleaved", PlanRequest(num_ranks=2, num_microbatches=4))
    assert all_channels(lower(plan)) == (
        Channel(0, 1, "act"),
        Channel(0, 1, "grad"),
        Channel(1, 0, "act"),
        Channel(1, 0, "grad"),
    )


def test_one_rank_has_no_messages() -> None:
    (program,) = lower(plan_schedule("interleaved", PlanRequest(num_ranks=1, num_microbatches=3)))
    assert program.channels == ()
    assert all(step.post == step.waits == step.sends == () for step in program.steps)


def test_look_ahead_below_zero_is_refused() -> None:
    with pytest.raises(ScheduleError, match="look_ahead is -1"):
        lower(random_plan(0), look_ahead=-1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_message_is_let_go_when_its_receiver_has_it(name: str) -> None:
    """By the simulated clock; and most messages are let go before the end."""
    plan = plan_schedule(name, PlanRequest(num_ranks=3, num_microbatches=9))
    costs = Costs.uniform(plan.placement, transfer=0.1)
    starts = simulate(plan, costs).starts
    programs = lower(plan)
    taken = {
        message: starts[program.rank][step]
        for program in programs
        for step, content in enumerate(program.steps)
        for message in content.waits
    }
    for program in programs:
        sent: set[Message] = set()
        let_go: set[Message] = set()
        for step, content in enumerate(program.steps):
            for message in content.arrived:
                assert message in sent and message not in let_go
                assert taken[message] <= starts[program.rank][step]
                let_go.add(message)
            sent.update(content.sends)
        assert len(sent - let_go) <= 2 * plan.placement.num_stages, "the cool-down alone is kept"
