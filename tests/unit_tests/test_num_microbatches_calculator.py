"""Batch sizes over a run, against the published formula of the ramp and against plain counting."""

import pytest

from megatron.core import num_microbatches_calculator as module
from megatron.core.num_microbatches_calculator import (
    BatchSizes,
    build_num_microbatches_calculator,
)


def ramp_formula(start, increment, samples, final, consumed):
    """Megatron's rule, word for word: constant steps over `samples`, `final` beyond them."""
    if consumed > samples or start == final:
        return final
    steps = (final - start) // increment
    return start + int(consumed / (samples / steps)) * increment


def counted_iterations(batch_sizes, num_samples):
    """Walks the run one iteration at a time."""
    consumed = iterations = 0
    while consumed + batch_sizes.at(consumed) <= num_samples:
        consumed += batch_sizes.at(consumed)
        iterations += 1
    return iterations


def test_constant():
    calculator = build_num_microbatches_calculator(
        global_batch_size=1024, micro_batch_size=2, data_parallel_size=8
    )
    assert (calculator.get(), calculator.current_global_batch_size) == (64, 1024)
    calculator.update(10**9)
    assert calculator.get() == 64


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"),
    [(16, 16, 1000, 64), (32, 32, 97, 256), (8, 8, 7, 64), (16, 16, 5859375, 1536), (4, 4, 0, 4)],
)
def test_ramp_follows_the_formula(start, increment, samples, final):
    sizes = BatchSizes.rampup(start, increment, samples, final)
    step = max(1, samples // 3000)
    for consumed in range(0, samples + 2 * step + 2, step):
        assert sizes.at(consumed) == ramp_formula(start, increment, samples, final, consumed)


def test_ramp_moves_the_calculator():
    calculator = build_num_microbatches_calculator(
        global_batch_size=64,
        micro_batch_size=4,
        data_parallel_size=2,
        rampup_batch_size=[16, 16, 96],
    )
    seen = []
    for consumed in (0, 31, 32, 64, 96, 97):
        calculator.update(consumed)
        seen.append((calculator.current_global_batch_size, calculator.get()))
    assert seen == [(16, 2), (16, 2), (32, 4), (48, 6), (64, 8), (64, 8)]


def test_indivisible_batch_is_refused_when_reached():
    calculator = build_num_microbatches_calculator(
        global_batch_size=64,
        micro_batch_size=8,
        data_parallel_size=1,
        rampup_batch_size=[16, 4, 96],
    )
    with pytest.raises(ValueError, match=r"20 is not a multiple of .* = 8; use 16 or 24"):
        calculator.update(8)
    assert calculator.current_global_batch_size == 16
    calculator.update(8, consistency_check=False)
    assert calculator.current_global_batch_size == 20


def test_step_schedule_in_tokens_and_in_samples():
    text = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    sizes = BatchSizes.steps(text, seq_length=2048)
    boundary = 2_400_000_000 // 2048
    assert [sizes.at(0), sizes.at(boundary - 1), sizes.at(boundary)] == [16, 16, 320]
    assert sizes.final == 1536
    assert BatchSizes.steps("0:4,1K:8").at(1000) == 8


@pytest.mark.parametrize(
    "text", ["", "5:16", "0:16 10:32 10:64", "0:16 1X:32", "0:0", "0:16 20:32 10:64"]
)
def test_unreadable_step_schedules(text):
    with pytest.raises(ValueError, match="--step-batch-size-schedule"):
        BatchSizes.steps(text)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((16, 15, 100, 64), "does not reach the global batch size 64 in whole increments"),
        ((128, 16, 100, 64), "does not reach"),
        ((0, 16, 100, 64), "at least 1"),
    ],
)
def test_impossible_ramps(ramp, message):
    with pytest.raises(ValueError, match=message):
        BatchSizes.rampup(*ramp)


@pytest.mark.parametrize("num_samples", [0, 5, 15, 16, 95, 96, 97, 200, 1000, 1003])
@pytest.mark.parametrize(
    "sizes",
    [
        BatchSizes.constant(16),
        BatchSizes.rampup(16, 16, 96, 64),
        BatchSizes.rampup(16, 16, 5, 64),  # several steps within one iteration
        BatchSizes.steps("0:8 30:32 100:4"),
        BatchSizes.steps("0:20 100:5"),  # falls, so a rest too small for 20 must not be filled
    ],
)
def test_iterations_of_a_run(sizes, num_samples):
    assert sizes.num_iterations(num_samples) == counted_iterations(sizes, num_samples)


def test_ramp_and_schedule_exclude_each_other():
    with pytest.raises(ValueError, match="give one"):
        module.batch_sizes_of(64, (16, 16, 100), "0:16 100:64")


@pytest.fixture
def no_calculator():
    module.unset_num_microbatches_calculator()
    yield
    module.destroy_num_microbatches_calculator()


def test_module_functions(no_calculator):
    with pytest.raises(RuntimeError, match="init_num_microbatches_calculator"):
        module.get_num_microbatches()
    module.init_num_microbatches_calculator(0, [16, 16, 96], 64, 4, 2)
    with pytest.raises(RuntimeError, match="already"):
        module.init_num_microbatches_calculator(0, None, 64, 4, 2)
    module.update_num_microbatches(40, consistency_check=True)
    assert module.get_num_microbatches() == 4
    assert module.get_current_global_batch_size() == 32
    assert module.get_current_running_global_batch_size() == 32
    assert module.get_micro_batch_size() == 4
    module.reconfigure_num_microbatches_calculator(0, None, 8, 1, 2)
    assert module.get_num_microbatches() == 4
    with pytest.raises(ValueError, match="decrease_batch_size_if_needed"):
        module.reconfigure_num_microbatches_calculator(0, None, 8, 1, 2, True)
