"""What a run says and checks before it trains, and what it tells of its pipeline afterwards."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import (
    TraceEvent,
    first_difference,
    load_trace,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.stage_context import StageContext
from tests.pretrain_runs import pretrain_case, run
from tests.training_runs import GPT, LLAMA
from tests.worker_pool import RankFailure
from tools import plan_schedule as plan_tool

_SHORT = "--global-batch-size 8 --train-iters 3 --eval-iters 0"  # 4 micro-batches
_RUN = f"{LLAMA} {_SHORT}"
_P2 = "--pipeline-model-parallel-size 2"

# By hand: a layer has 4 matrices (qkv, projection, two of the MLP); the embedding and the head have
# one each; learned positions are one more.
_DEFERRED = {
    f"{LLAMA} --pipeline-schedule zb-h1": "9 9",
    f"{LLAMA} --pipeline-schedule zb-v": "5 4 4 5",
    f"{LLAMA} --pipeline-schedule v-half --num-layers-per-stage 1 2 1 0": "5 8 4 1",
    f"{LLAMA} --pipeline-schedule zb-interleaved --untie-embeddings-and-output-weights": "5 4 4 5",
    f"{GPT} --pipeline-schedule dualpipe-v": "6 4 4 5",
}
_NOT_SPLIT = f"{LLAMA} --pipeline-schedule 1f1b"


@pytest.mark.timeout(60)
def test_the_banner_counts_the_weight_gradients_that_each_stage_defers(pool: Any) -> None:
    cases = [f"{case} {_SHORT} {_P2}" for case in (*_DEFERRED, _NOT_SPLIT)]
    *deferred, fused = run(pool, 2, *cases)
    for case, counts, history in zip(_DEFERRED, _DEFERRED.values(), deferred, strict=True):
        said = f": weight gradients per stage, deferred from each B to its W: {counts}\n"
        assert said in history.output, case
    assert "per stage, done with the backward (no split): 9 9\n" in fused.output


# The fork's and Megatron's spellings -> the schedule they are, and what the planner is told.
_SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "--zero-bubble-v-schedule": ("zb-v", {}),
    "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half": ("v-half", {}),
    "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min": ("v-min", {}),
    "--enable-zero-bubble": ("zb", {}),
    "--enable-zero-bubble --zero-bubble-max-pending-backward 6": (
        "zb",
        {"memory_limits": (6,) * 4},
    ),
    "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half "
    "--zero-bubble-max-pending-backward 2.5": ("v-half", {"memory_limits": (2.5,) * 4}),
    "--enable-1f1b-v": ("1f1b-v", {}),
    "--num-layers-per-virtual-pipeline-stage 1": ("interleaved", {"num_chunks": 2}),
    "": ("1f1b", {}),
}


@pytest.mark.timeout(60)
def test_every_spelling_runs_its_schedule(pool: Any, tmp_path: pathlib.Path) -> None:
    """By the order in which the ranks really ran it."""
    model = f"{_RUN} --num-layers 8 --global-batch-size 12"
    files = [str(tmp_path / f"{index}.json") for index in range(len(_SPELLINGS))]
    cases = [
        f"{model} --pipeline-model-parallel-size 4 {flags} --trace-pipeline {file}"
        for flags, file in zip(_SPELLINGS, files, strict=True)
    ]
    (single,) = run(pool, 1, model)
    histories = run(pool, 4, *cases)
    orders = set()
    for history, file, (flags, (name, options)) in zip(
        histories, files, _SPELLINGS.items(), strict=True
    ):
        plan = plan_schedule(name, PlanRequest(num_ranks=4, num_microbatches=6, **options))
        assert first_difference(plan, load_trace(file)) is None, flags
        assert f"schedule {name}: " in history.output
        assert history.losses == single.losses, flags
        orders.add(plan.programs)
    assert len(orders) == len(_SPELLINGS), "no two are told apart by their name alone"


@pytest.mark.timeout(60)
def test_the_measured_timeline_can_be_laid_over_the_plan(
    pool: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, saved, page = (tmp_path / name for name in ("trace.json", "run.plan", "page.html"))
    schedule = "zb-v"
    run(pool, 2, f"{_RUN} {_P2} --pipeline-schedule {schedule} --trace-pipeline {trace}")
    plan = plan_schedule(schedule, PlanRequest(num_ranks=2, num_microbatches=4))
    for iteration in (1, 2, 3):
        events = load_trace(trace, iteration)
        assert first_difference(plan, events) is None
        _assert_one_clock(plan, events)
    plan.save(saved)
    words = ["--plan", str(saved), "--measured", str(trace), "--html", str(page)]
    assert plan_tool.main(words) == 0
    assert "measured      in the planned order on every rank" in capsys.readouterr().out
    shown = page.read_text()
    assert "The measured order is the planned one on every rank." in shown
    assert re.search(r'"measured": ?\[\[\["0', shown)


def _assert_one_clock(plan: Plan, events: list[TraceEvent]) -> None:
    """Nothing starts before what it needs has: also when that ran on the other rank."""
    starts = {event.instruction: event.start_us for event in events}
    last = plan.placement.last_stage
    for (op, stage, microbatch), start in starts.items():
        needs = []
        if op is Op.F and stage > 0:
            needs.append(Instruction(Op.F, stage - 1, microbatch))
        if op is Op.B and stage < last:
            needs.append(Instruction(Op.B, stage + 1, microbatch))
        assert all(starts[need] < start for need in needs if need in starts)


@pytest.mark.timeout(60)
def test_the_time_of_a_step_is_broken_down(pool: Any, tmp_path: pathlib.Path) -> None:
    """In the line and in the metrics file: what it names, and no more than the step took."""
    metrics = tmp_path / "metrics.jsonl"
    flags = f"--log-step-breakdown --log-interval 1 --metrics-file {metrics}"
    (history,) = run(pool, 2, f"{_RUN} {_P2} --pipeline-schedule zb-h1 {flags}")
    names = ["compute F", "compute B", "compute W", "waiting", "communication", "optimizer", "data"]
    lines = [line for line in history.output.splitlines() if "elapsed time per iteration" in line]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "timings_ms" in record]
    assert len(lines) == len(steps) == 3
    for line, record in zip(lines, steps, strict=True):
        elapsed = float(re.findall(r"iteration \(ms\): (\d+\.\d)", line)[0])
        shown = dict(re.findall(r"\| ([\w ]+) \(ms\): (\d+\.\d)(?= \|)", line))
        shown = {name: float(ms) for name, ms in shown.items() if name in names}
        assert set(shown) == set(names)
        assert all(shown[name] > 0 for name in ("compute F", "compute B", "compute W"))
        # The wait for data is within F; the others are parts of one time, each rounded.
        parts = sum(shown[name] for name in names)
        assert 0 < parts <= elapsed + 0.1 * len(names)
        timings = record["timings_ms"]
        assert all(abs(timings[name] - shown[name]) < 0.06 for name in names)


def _spoilt(
    pre_process: bool = True,
    post_process: bool = True,
    stage: StageContext | None = None,
    *,
    spoil: Callable[[GPTModel], None],
) -> GPTModel:
    """The model, `spoil` applied behind the drawing of its weights."""
    model = pretrain_gpt.model_provider(pre_process, post_process, stage)
    draw = model.initialize_weights

    def then_spoil(seed: int) -> None:
        draw(seed)
        with torch.no_grad():
            spoil(model)

    model.initialize_weights = then_spoil  # type: ignore[method-assign]
    return model


def _zero_one_matrix(model: GPTModel) -> None:
    """Layer 3 (of 0 to 3) is on the last stage."""
    layers: Any = model.decoder.layers
    for layer in layers:
        if layer.layer_number == 4:
            layer.mlp.linear_fc2.weight.zero_()


def _change_the_heads_copy(model: GPTModel) -> None:
    """One value of the head's copy, by one bit; or all of it, as the fork's zero head."""
    if model.post_process and not model.pre_process:
        weight = model.output_layer.weight
        assert weight is not None
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(torch.inf))


def _zero_head(model: GPTModel) -> None:
    if model.post_process and not model.pre_process:
        assert model.output_layer.weight is not None
        model.output_layer.weight.zero_()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            _zero_one_matrix,
            "weight decoder.layers.3.mlp.linear_fc2.weight is all zero after the model was built",
        ),
        (_zero_head, "weight embedding.word_embeddings.weight is all zero after the model was"),
        (_change_the_heads_copy, "the tied embedding and output weights differ between the first"),
    ],
)
def test_weights_that_would_not_train_stop_the_run(pool: Any, spoil: Any, said: str) -> None:
    provider = functools.partial(_spoilt, spoil=spoil)
    case = f"{_RUN} {_P2} --pipeline-schedule zb-h1"
    with pytest.raises(RankFailure) as caught:
        pool.run(2, functools.partial(pretrain_case, model_provider=provider), case)
    assert said in str(caught.value)
