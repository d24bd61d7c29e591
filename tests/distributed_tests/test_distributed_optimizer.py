"""Optimizer state cut over replicas changes memory and nothing else."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from tests.distributed_tests.test_data_parallel import assert_close_training
from tests.pretrain_runs import assert_same_training, run
from tests.training_runs import GPT, LLAMA, start

_P2 = "--pipeline-model-parallel-size 2"
_STEPS = "--num-layers 2 --global-batch-size 12 --train-iters 3 --eval-iters 0"
_GPT = f"{GPT} {_STEPS} --untie-embeddings-and-output-weights"
_CASES = {
    "fp32": _GPT,
    "bf16": f"{LLAMA} {_STEPS} --bf16",
    "sgd": f"{_GPT} --optimizer sgd",
    "fp16": f"{LLAMA} {_STEPS} --fp16 --initial-loss-scale 4194304 --hysteresis 1",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(2, ""), (3, ""), (4, _P2), (6, f"{_P2} --pipeline-schedule dualpipe-v --num-layers 4")],
)
def test_equals_whole_state_bit_for_bit(pool: Any, world_size: int, flags: str) -> None:
    """Losses, norms, weights, moments, counts of zeros, for even and odd numbers of replicas.

    Biases of 36 elements divide neither by 3 nor into whole vectors of the processor.
    """
    odd = "--ffn-hidden-size 36 --log-num-zeros-in-grad --log-params-norm"
    cases = {label: f"{case} {flags} {odd}" for label, case in _CASES.items()}
    if world_size > 2:  # the types once, the sizes with one or two
        labels = ("fp32",) if world_size == 6 else ("fp32", "bf16")
        cases = {label: cases[label] for label in labels}
    sharded = [f"{case} --use-distributed-optimizer" for case in cases.values()]
    overlapped = f"{sharded[0]} --overlap-grad-reduce"
    histories = run(pool, world_size, *cases.values(), *sharded, overlapped)
    whole = histories[: len(cases)]
    for label, ours, expected in zip(cases, histories[len(cases) :], whole, strict=False):
        assert_same_training(ours, expected, label)
        assert [step.num_zeros for step in ours.steps] == [s.num_zeros for s in expected.steps]
        for step, other in zip(ours.steps, expected.steps, strict=True):
            assert step.params_norm == pytest.approx(other.params_norm, rel=1e-12), label
    assert_same_training(histories[-1], whole[0], "overlapped")
    if "fp16" in cases:
        skips = [step.skipped for step in whole[list(cases).index("fp16")].steps]
        assert True in skips and False in skips, "the case has an overflow and a step"


@pytest.mark.timeout(60)
def test_tied_weights_over_replicas_and_pipeline_equal_one_process(pool: Any) -> None:
    """The tied sum comes before the sum over replicas is cut: else a use of it is lost."""
    case = f"{LLAMA} --attention-dropout 0 --hidden-dropout 0 {_STEPS} --optimizer sgd --lr 0.1"
    (single,) = run(pool, 1, case)
    (several,) = run(pool, 4, f"{case} {_P2} --use-distributed-optimizer")
    assert_close_training(several, single)


def _state_sizes(case: str) -> tuple[int, int]:
    """(elements of optimizer state on this rank, elements of its parameters)"""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, _, _ = start(case)
    optimizer = trainer.optimizer
    state = sum(
        tensor.numel()
        for entry in optimizer.entries
        for tensor in optimizer.inner.state[entry.main].values()
    )
    return state, sum(entry.parameter.numel() for entry in optimizer.entries)


@pytest.mark.timeout(60)
def test_each_replica_holds_its_share_of_the_state(pool: Any) -> None:
    for dp in (2, 3):
        case = f"{LLAMA} {_STEPS} --use-distributed-optimizer"
        for state, parameters in pool.run(dp, _state_sizes, case):
            assert 2 * parameters / dp <= state <= 1.1 * 2 * parameters / dp
