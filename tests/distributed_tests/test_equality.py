"""Losses, gradient norms and weights are bit-identical for every pipeline size (design 4)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.training_runs import GPT, LLAMA, Outcome, merged, train_case, train_cases

_CASES = {
    f"{name} {tied} {dtype} dropout {dropout}": (
        f"{architecture} --global-batch-size 8 "
        f"{'' if tied == 'tied' else '--untie-embeddings-and-output-weights'} "
        f"{'--bf16' if dtype == 'bf16' else ''} "
        f"--attention-dropout {dropout} --hidden-dropout {dropout}"
    )
    for (name, architecture), tied, dtype, dropout in itertools.product(
        [("llama", LLAMA), ("gpt", GPT)], ["tied", "untied"], ["fp32", "bf16"], [0.0, 0.1]
    )
}


def assert_same(ours: Sequence[Outcome], reference: Outcome, label: str) -> None:
    """All ranks of a pipeline together left what one process left, to the last bit."""
    assert [loss for rank in ours for loss in rank.losses] == reference.losses, label
    for rank in ours:
        assert rank.norms == reference.norms, label
    assert merged(ours, "initial") == reference.initial, label
    assert merged(ours, "final") == reference.final, label
    assert reference.initial != reference.final, f"{label}: training changed nothing"
    assert len(reference.losses) == 5, label


@pytest.fixture(scope="module")
def reference(pool: Any) -> list[Outcome]:
    return pool.run(1, train_cases, list(_CASES.values()), timeout_s=120)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("p", [2, 4])
def test_pipeline_equals_one_process(pool: Any, reference: list[Outcome], p: int) -> None:
    cases = [f"{case} --pipeline-model-parallel-size {p}" for case in _CASES.values()]
    per_rank = pool.run(p, train_cases, cases, timeout_s=200)
    for index, label in enumerate(_CASES):
        assert_same([rank[index] for rank in per_rank], reference[index], f"{label} p={p}")


def test_dropout_and_ties_matter(reference: list[Outcome]) -> None:
    """The cases differ, so equality above is not that of runs that ignore their flags."""
    assert len({tuple(outcome.losses) for outcome in reference}) == len(_CASES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_few_micro_batches(pool: Any, p: int) -> None:
    """m = 1 .. p-1 runs, and equals one process."""
    for m in range(1, p):
        case = f"{LLAMA} --num-layers {p} --global-batch-size {2 * m}"
        single = pool.run(1, train_case, case, timeout_s=60)[0]
        piped = pool.run(p, train_case, f"{case} --pipeline-model-parallel-size {p}", timeout_s=60)
        assert_same(piped, single, f"p={p} m={m}")


_WITHOUT_EFFECT_ON_NUMBERS = [
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--recompute-activations",
    "--recompute-granularity selective --recompute-modules mlp",
    "--debug-pipeline-messages --overlap-grad-reduce",
    "--no-mmap-bin-files --manual-gc --manual-gc-interval 1",
    "--pipeline-schedule zb-h2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
]


@pytest.mark.timeout(200)
def test_flags_that_must_not_change_a_bit(pool: Any) -> None:
    base = f"{GPT} --global-batch-size 8 --attention-dropout 0.1 --hidden-dropout 0.1"
    single = pool.run(1, train_case, base, timeout_s=60)[0]
    cases = [
        f"{base} --pipeline-model-parallel-size 2 {flags}" for flags in _WITHOUT_EFFECT_ON_NUMBERS
    ]
    per_rank = pool.run(2, train_cases, cases, timeout_s=150)
    for index, flags in enumerate(_WITHOUT_EFFECT_ON_NUMBERS):
        assert_same([rank[index] for rank in per_rank], single, flags)
