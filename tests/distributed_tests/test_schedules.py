"""Every schedule trains like one process, to the last bit: losses, norms, weights, evaluation."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from tests.distributed_tests.test_equality import assert_same
from tests.training_runs import GPT, LLAMA, Outcome, train_cases


class Case(NamedTuple):
    """A schedule on p ranks with m micro-batches, and the model it trains."""

    schedule: str
    p: int
    m: int
    architecture: str
    tied: bool
    dtype: str
    dropout: float

    @property
    def model(self) -> str:
        num_layers = {2: 4, 3: 8, 4: 8, 8: 16}[self.p]
        return (
            f"{LLAMA if self.architecture == 'llama' else GPT} --num-layers {num_layers} "
            f"--global-batch-size {2 * self.m} {'' if self.tied else UNTIED} "
            f"{'--bf16' if self.dtype == 'bf16' else ''} "
            f"--attention-dropout {self.dropout} --hidden-dropout {self.dropout}"
        )

    @property
    def command(self) -> str:
        """Eight layers do not divide into three or six stages: those are padded."""
        return (
            f"{self.model} --pipeline-schedule {self.schedule} --allow-padding-num-layers "
            f"--pipeline-model-parallel-size {self.p}"
        )


UNTIED = "--untie-embeddings-and-output-weights"
_MICROBATCHES = {2: [1, 2, 5], 3: [1, 2, 3, 7], 4: [1, 2, 3, 4, 9], 8: [4]}
_IN_TURN = {2: [(1, 5), (2, 5)], 3: [(1, 3), (2, 7)], 4: [(1, 4), (2, 9), (3, 9)]}
_MODELS = list(itertools.product(["llama", "gpt"], [True, False], ["fp32", "bf16"], [0.0, 0.1]))
_FEW_MODELS = [  # every pair of values is among them
    ("llama", True, "fp32", 0.1),
    ("llama", False, "bf16", 0.0),
    ("gpt", True, "bf16", 0.1),
    ("gpt", False, "fp32", 0.0),
    ("llama", True, "bf16", 0.0),
    ("gpt", False, "bf16", 0.1),
    ("gpt", True, "fp32", 0.0),
    ("llama", False, "fp32", 0.1),
]


def covering_cases() -> list[Case]:
    """Every schedule with every p; numbers of micro-batches and models take turns."""
    models = itertools.cycle(_FEW_MODELS)
    return [
        Case(schedule, p, m, *next(models))
        for p, choices in _IN_TURN.items()
        for schedule, chosen in zip(SCHEDULES, itertools.cycle(choices), strict=False)
        for m in chosen
    ]


def full_grid() -> list[Case]:
    sizes = [(p, m) for p in (2, 3, 4, 8) for m in _MICROBATCHES[p]]
    return [Case(s, *size, *model) for s in SCHEDULES for size in sizes for model in _MODELS]


def check(pool: Any, cases: list[Case]) -> None:
    """Run the cases' models in one process, then each case on its ranks; compare."""
    models = sorted({case.model for case in cases})
    outcomes = pool.run(1, train_cases, models, timeout_s=600)[0]
    reference: dict[str, Outcome] = dict(zip(models, outcomes, strict=True))
    for p in sorted({case.p for case in cases}):
        chosen = [case for case in cases if case.p == p]
        per_rank = pool.run(p, train_cases, [case.command for case in chosen], timeout_s=600)
        for index, case in enumerate(chosen):
            assert_same([rank[index] for rank in per_rank], reference[case.model], str(case))


def test_the_cases_cover() -> None:
    """Each schedule meets every p, few and many micro-batches, and every pair of model options."""
    options = ("architecture", "tied", "dtype", "dropout")
    for schedule in SCHEDULES:
        cases = [case for case in covering_cases() if case.schedule == schedule]
        assert {case.p for case in cases} == {2, 3, 4}
        assert any(case.m < case.p for case in cases) and any(case.m > case.p for case in cases)
        for pair in itertools.combinations(options, 2):
            met = {tuple(getattr(case, option) for option in pair) for case in cases}
            assert len(met) == 4, f"{schedule}: {pair}"
    for p, counts in _MICROBATCHES.items():
        met_counts = {case.m for case in covering_cases() if case.p == p}
        assert p == 8 or met_counts == set(counts)


@pytest.mark.timeout(900)
def test_every_schedule_trains_like_one_process(pool: Any) -> None:
    check(pool, covering_cases())


@pytest.mark.timeout(300)
def test_eight_ranks(pool: Any) -> None:
    models = itertools.cycle(_FEW_MODELS)
    check(pool, [Case(schedule, 8, 4, *next(models)) for schedule in SCHEDULES])


def _check_splits(pool: Any, model: str, p: int, splits: dict[str, str]) -> None:
    """Every schedule on p ranks, with layers split by the flags given for its placement."""
    single = pool.run(1, train_cases, [model], timeout_s=60)[0][0]
    commands = [
        f"{model} --pipeline-model-parallel-size {p} --pipeline-schedule {name} "
        f"{splits[schedule.placement]}"
        for name, schedule in SCHEDULES.items()
    ]
    per_rank = pool.run(p, train_cases, commands, timeout_s=120)
    for index, command in enumerate(commands):
        assert_same([rank[index] for rank in per_rank], single, command)


@pytest.mark.timeout(300)
def test_uneven_layers_by_list(pool: Any) -> None:
    """Layers per stage as the user lists them, empty stages in the middle and at an end too."""
    list_of = "--num-layers-per-stage"
    splits = {
        "plain": f"{list_of} 5 1",
        "looped": f"{list_of} 3 0 1 2",
        "v": f"{list_of} 1 4 0 1",
    }
    _check_splits(pool, f"{GPT} --num-layers 6 --global-batch-size 8", 2, splits)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("p", "num_layers"), [(3, 7), (4, 6)])
def test_two_layers_fewer_than_a_multiple_of_the_ranks(pool: Any, p: int, num_layers: int) -> None:
    """k p - 2 layers, so that the stages with the embedding and the head have one less."""
    padded = dict.fromkeys(("plain", "looped", "v"), "--allow-padding-num-layers")
    _check_splits(pool, f"{LLAMA} --num-layers {num_layers} --global-batch-size 6", p, padded)


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_full_grid(pool: Any) -> None:
    check(pool, full_grid())
