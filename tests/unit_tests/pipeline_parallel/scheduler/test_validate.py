"""The validator against a brute-force execution, and every message it can give."""

from __future__ import annotations

import random

import pytest
from brute_force import RandomPlans, is_complete, runs_to_the_end
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import (
    last_weight_grad_steps,
    reduction_steps,
    validate,
)


def plain(m: int, *programs: str) -> Plan:
    """A plan on two ranks of one stage each (or on as many as there are programs)."""
    placement = " ".join(f"{rank}.0" for rank in range(len(programs)))
    rows = "".join(f"rank {rank}: {program}\n" for rank, program in enumerate(programs))
    return Plan.from_text(f"schedule: mine\nmicrobatches: {m}\nplacement: {placement}\n{rows}")


def message(plan: Plan, **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(plan, **options)  # type: ignore[arg-type]
    return str(caught.value)


def accepts(plan: Plan) -> bool:
    try:
        validate(plan)
    except ScheduleError:
        return False
    return True


def mutate(plan: Plan, rng: random.Random) -> Plan:
    """One small damage: swap, drop, duplicate, move to another rank, or change an instruction."""
    programs = [list(program) for program in plan.programs]
    rank = rng.choice([r for r, program in enumerate(programs) if program])
    program = programs[rank]
    step = rng.randrange(len(program))
    kind = rng.choice(
        ["swap", "swap", "shift", "drop", "double", "move", "change", "reduce", "check"]
    )
    if kind == "swap":
        other = rng.randrange(len(program))
        program[step], program[other] = program[other], program[step]
    elif kind == "shift":
        program.insert(rng.randrange(len(program)), program.pop(step))
    elif kind == "drop":
        program.pop(step)
    elif kind == "double":
        program.insert(rng.randrange(len(program) + 1), program[step])
    elif kind == "move":
        target = rng.choice(programs)
        target.insert(rng.randrange(len(target) + 1), program.pop(step))
    elif kind == "check":
        for other, held in enumerate(plan.placement.stages_by_rank):
            at = rng.choice([0, 0, 1, 2, len(programs[other])])
            programs[other].insert(at, Instruction(Op.PV, held[0], 0))
    elif kind == "reduce":
        last = plan.num_microbatches - rng.choice([1, 1, 2])
        program.insert(step, Instruction(Op.AR, program[step].stage, last))
        program.append(Instruction(Op.AR, program[-1].stage, plan.num_microbatches - 1))
    else:
        op, stage, microbatch = program[step]
        program[step] = rng.choice(
            [
                Instruction(rng.choice(list(Op)), stage, microbatch),
                Instruction(op, stage + rng.choice([-1, 1]), microbatch),
                Instruction(op, stage, microbatch + rng.choice([-1, 1])),
            ]
        )
    return Plan.of("mutated", plan.placement, plan.num_microbatches, programs)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), damage=st.integers(0, 3))
def test_verdict_equals_brute_force(seed: int, damage: int) -> None:
    rng = random.Random(seed)
    plans = RandomPlans(rng)
    plan = plans.plan(plans.placement(3, 2), rng.randint(1, 4), rng.choice([0.0, 0.5, 1.0]))
    assert accepts(plan)
    for _ in range(damage):
        plan = mutate(plan, rng)
    assert accepts(plan) == (is_complete(plan) and runs_to_the_end(plan)), plan.to_text()


def test_the_mutations_reach_both_verdicts() -> None:
    """Guards the test above: damage must sometimes be harmless and sometimes deadlock."""
    rng = random.Random(0)
    plans = RandomPlans(rng)
    verdicts = set()
    for _ in range(400):
        plan = mutate(plans.plan(plans.placement(3, 2), 3, 0.5), rng)
        verdicts.add((is_complete(plan), is_complete(plan) and runs_to_the_end(plan)))
    assert verdicts == {(False, False), (True, False), (True, True)}


def test_forward_only_plans_need_no_backward() -> None:
    validate(plain(2, "0F0 0F1", "1F0 1F1"))
    assert "never runs 1F1" in message(plain(2, "0F0 0F1", "1F0"))


def test_forward_only_plans_do_not_train() -> None:
    assert "the plan has forwards only" in message(plain(1, "0F0", "1F0"), training=True)
    validate(plain(1, "0F0 0BW0", "1F0 1BW0"), training=True)


def test_sizes() -> None:
    placement = Placement.plain(2)
    assert "0 micro-batches" in message(Plan.of("mine", placement, 0, [[], []]))
    text = message(Plan.of("mine", placement, 1, [[Instruction(Op.F, 0, 0)]]))
    assert "programs for 1 ranks" in text and "placement has 2" in text


def test_out_of_range_and_wrong_rank() -> None:
    text = message(plain(1, "0F0 2F0 0BW0", "1F0 1BW0"))
    assert text == "rank 0 step 1: 2F0 names stage 2, but the plan has stages 0 to 1"
    text = message(plain(1, "0F0 0BW0", "1F0 1BW1"))
    assert text == (
        "rank 1 step 1: 1BW1 names micro-batch 1, but the plan has micro-batches 0 to 0"
    )
    text = message(plain(1, "0F0 1F0 0BW0", "1BW0"))
    assert text == ("rank 0 step 1: 1F0 is not this rank's: the placement puts stage 1 on rank 1")


def test_missing_and_repeated() -> None:
    text = message(plain(2, "0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1B1"))
    assert text == (
        "rank 1 never runs 1W1 or 1BW1: the weight gradient of stage 1, micro-batch 1 is missing"
    )
    text = message(plain(2, "0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F0 1F1 1BW1"))
    assert text == "rank 1 step 2: 1F0 repeats the forward of stage 1, micro-batch 0"
    text = message(plain(1, "0F0 0BW0 0W0", "1F0 1BW0"))
    assert text == "rank 0 step 2: 0W0 repeats the weight gradient of stage 0, micro-batch 0"
    text = message(plain(2, "0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"))
    assert text == "rank 0 step 0: 0F1 comes in a program that never runs 0F0"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("1F1 1F0 1B0 1W0 1B1 1W1", "step 0: 1F1 runs before 1F0; a stage's forwards"),
        ("1F0 1F1 1B1 1B0 1W0 1W1", "step 2: 1B1 runs before 1B0 or 1BW0; a stage's backwards"),
        ("1F0 1F1 1B0 1B1 1W1 1W0", "step 4: 1W1 runs before 1W0 or 1BW0; a stage's weight grad"),
    ],
)
def test_micro_batch_order(program: str, expected: str) -> None:
    text = message(plain(2, "0F0 0F1 0B0 0W0 0B1 0W1", program))
    assert text.startswith(f"rank 1 {expected}") and text.endswith("in micro-batch order")


def test_need_made_later_on_the_same_rank() -> None:
    first, *others = message(plain(1, "0F0 0BW0", "1F0 1W0 1B0")).splitlines()
    assert first == (
        "no rank can proceed; the first bad instruction is rank 1 step 1: 1W0 waits for wctx(1,0), "
        "made by 1B0 later on the same rank (step 2)"
    )
    assert others == [
        "blocked ranks:",
        "  rank 0 step 1: 0BW0 waits for grad(1,0), made by 1B0 on rank 1 (step 2)",
        "  rank 1 step 1: 1W0 waits for wctx(1,0), made by 1B0 later on the same rank (step 2)",
    ]


def test_deadlock_across_ranks_names_every_blocked_rank() -> None:
    text = message(plain(2, "0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"))
    assert "the first bad instruction is rank 0 step 1: 0BW0 waits for grad(1,0)" in text
    assert text.splitlines()[1:] == [
        "blocked ranks:",
        "  rank 0 step 1: 0BW0 waits for grad(1,0), made by 1BW0 on rank 1 (step 2)",
        "  rank 1 step 1: 1F1 waits for act(0,1), made by 0F1 on rank 0 (step 2)",
        "  rank 2 step 2: 2F1 waits for act(1,1), made by 1F1 on rank 1 (step 1)",
    ]


def test_memory_limits_are_per_rank() -> None:
    plan = plain(3, "0F0 0F1 0F2 0BW0 0BW1 0BW2", "1F0 1BW0 1F1 1BW1 1F2 1BW2")
    validate(plan, memory_limits=[3, 1])
    assert message(plan, memory_limits=[2, 1]) == (
        "rank 0 step 2: 0F2 raises the memory held to 3, above the limit 2"
    )
    assert "rank 1 step 0: 1F0 raises" in message(plan, memory_limits=[3, 0.5])
    assert "1 memory limits are given for 2 ranks" in message(plan, memory_limits=[3])


def test_memory_between_b_and_w_counts() -> None:
    plan = plain(2, "0F0 0B0 0F1 0B1 0W0 0W1")
    costs = Costs.uniform(plan.placement, held_f_to_b=4.0, held_b_to_w=3.0)
    validate(plan, costs=costs, memory_limits=[7.0])
    assert "step 2: 0F1 raises the memory held to 7" in message(
        plan, costs=costs, memory_limits=[6.9]
    )


def test_costs_of_another_placement_are_refused() -> None:
    plan = plain(1, "0F0 0BW0")
    text = message(plan, costs=Costs.uniform(Placement.plain(2)))
    assert text == "costs are given for 2 stages, but the plan has 1"


def test_reduction_comes_after_the_last_weight_gradient() -> None:
    validate(plain(2, "0F0 0B0 0W0 0F1 0BW1 0AR1"))
    assert message(plain(2, "0F0 0B0 0W0 0F1 0B1 0AR1 0W1")) == (
        "rank 0 step 5: 0AR1 would reduce the gradients of stage 0 before its last weight "
        "gradient, 0W1 or 0BW1"
    )
    assert message(plain(2, "0F0 0BW0 0AR0 0F1 0BW1")) == (
        "rank 0 step 2: 0AR0 would reduce the gradients of stage 0 after micro-batch 0, but its "
        "last weight gradient is that of micro-batch 1; write 0AR1"
    )
    assert "0AR0 repeats the reduction of stage 0" in message(plain(1, "0F0 0BW0 0AR0 0AR0"))


def test_reduction_steps() -> None:
    plan = plain(2, "0F0 0F1 0BW0 0BW1", "1F0 1B0 1F1 1B1 1W0 1W1 1AR1")
    assert last_weight_grad_steps(plan) == {0: 3, 1: 5}
    assert reduction_steps(plan) == {0: 3, 1: 6}
    assert reduction_steps(plain(1, "0F0")) == {}
