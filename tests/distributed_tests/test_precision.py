"""Numbers: how the loss is scaled, what overflow does, which values optimizer and rates take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.models.gpt import GPTModel
from megatron.core.stage_context import StageContext
from megatron.training.model_setup import Trainer
from tests.pretrain_runs import assert_same_training, run, tail
from tests.training_runs import GPT, LLAMA

_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_P2 = "--pipeline-model-parallel-size 2"


def _uneven_forward_step(
    data_iterator: Iterator[Any] | None, model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Leaves out a part of the tokens that differs from sequence to sequence."""
    batch = pretrain_gpt.get_batch(data_iterator, model.module.stage) or {}
    output = model(batch.get("tokens"), batch.get("position_ids"), labels=batch.get("labels"))
    mask = batch.get("loss_mask")
    if mask is not None:
        labels = batch["labels"]
        mask = mask * (labels < 20 + 6 * (labels[:, :1] % 17))
    return output, partial(pretrain_gpt.loss_func, mask)


def _norms_of_cuts(pool: Any, world_size: int, flags: str, **options: Any) -> list[float]:
    """Gradient norm of the first step, for one global batch of 16 cut in three ways."""
    base = f"{LLAMA} --num-layers 2 {_NO_DROPOUT} --global-batch-size 16 --train-iters 3 {flags}"
    base += " --eval-iters 0 --clip-grad 0"
    cuts = [f"{base} --micro-batch-size {size}" for size in (4, 2, 1)]
    runs = run(pool, world_size, *cuts, **options)
    return [history.steps[0].grad_norm or 0.0 for history in runs]


@pytest.mark.timeout(120)
def test_one_global_batch_has_one_gradient_norm(pool: Any) -> None:
    """(4, 4), (2, 8), (1, 16): micro-batch size times number is divided out exactly once.

    The three differ by the rounding of fp32 sums alone.
    """
    norms = _norms_of_cuts(pool, 1, "")
    for world_size, flags in ((2, ""), (4, f"{_P2} --pipeline-schedule zb-h1")):
        norms += _norms_of_cuts(pool, world_size, flags)
    assert norms == pytest.approx([norms[0]] * 9, rel=1e-6)


@pytest.mark.timeout(120)
def test_per_token_loss_with_uneven_masks_has_one_gradient_norm(pool: Any) -> None:
    """Only division by the global token count does not depend on how tokens are grouped."""
    uneven: dict[str, Any] = {"forward_step": _uneven_forward_step}
    averaged = _norms_of_cuts(pool, 1, "", **uneven)
    assert max(averaged) > 1.001 * min(averaged), "the masks are uneven: averages are biased"
    tokens = "--calculate-per-token-loss"
    norms = _norms_of_cuts(pool, 1, tokens, **uneven)
    for world_size, flags in ((2, ""), (4, _P2)):
        norms += _norms_of_cuts(pool, world_size, f"{tokens} {flags}", **uneven)
    assert norms == pytest.approx([norms[0]] * 9, rel=1e-6)


_BASE = f"{LLAMA} --num-layers 2 --global-batch-size 8 --train-iters 4 --eval-iters 0"
_FP16 = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2"


@pytest.mark.timeout(120)
def test_fp16_and_sgd_are_bit_identical_over_the_pipeline(pool: Any) -> None:
    cases = [f"{_BASE} {_FP16}", f"{_BASE} --optimizer sgd", f"{_BASE} --fp16 --loss-scale 1024"]
    single = run(pool, 1, *cases)
    skipped = [step.skipped for step in single[0].steps]
    assert True in skipped and False in skipped
    for schedule in ("1f1b", "zb-h1"):
        flags = f"{_P2} --pipeline-schedule {schedule}"
        piped = run(pool, 2, *(f"{case} {flags}" for case in cases))
        for case, ours, reference in zip(cases, piped, single, strict=True):
            assert_same_training(ours, reference, f"{schedule}: {case}")


class _Poison:
    """Puts a value into one gradient of the last rank, before the optimizer sees it."""

    def __init__(self, value: float, iterations: tuple[int, ...]) -> None:
        self._value, self._iterations = value, iterations

    def __call__(self, trainer: Trainer, iteration: int) -> None:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if iteration not in self._iterations or not last:
            return
        optimizer, unscale = trainer.optimizer, trainer.optimizer.unscale

        def poisoned() -> None:  # the first thing that a step does, early or not
            del optimizer.unscale  # type: ignore[attr-defined]
            optimizer.entries[0].grad.view(-1)[0] = self._value
            unscale()

        optimizer.unscale = poisoned  # type: ignore[method-assign]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "flags", "value"),
    [
        (1, "", math.nan),
        (2, _P2, math.inf),
        (2, f"{_P2} --pipeline-schedule zb-h1", math.nan),
        (2, "--use-distributed-optimizer", math.inf),
        (4, f"{_P2} --use-distributed-optimizer", math.nan),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    pool: Any, world_size: int, flags: str, value: float
) -> None:
    """In every precision, on all ranks, counted, and without a trace in weights and rates.

    It is on one rank only. `run` asserts that ranks agree on skips, norms, scales and weights.
    """
    base = f"{LLAMA} --num-layers 2 --global-batch-size 8 --train-iters 5 --eval-iters 0 {flags}"
    base += " --lr-warmup-iters 4 --log-interval 5 --initial-loss-scale 1024"
    precisions = ("", "--bf16", "--fp16")
    cases = [f"{base} {precision}" for precision in precisions]
    histories = run(pool, world_size, *cases, before_step=_Poison(value, (3, 4)))
    for precision, history in zip(precisions, histories, strict=True):
        assert [step.skipped for step in history.steps] == [False, False, True, True, False]
        weights = history.weights
        assert weights[1] != weights[2] == weights[3] == weights[4] != weights[5]
        rates = [step.learning_rate for step in history.steps]
        assert rates[0] < rates[1] == rates[2] == rates[3] < rates[4], "the schedule waits"
        assert re.findall(r"skipped iterations: +(\d+) \|", history.output) == ["2"]
        scales = [step.loss_scale for step in history.steps]
        halved = [1024.0, 1024.0, 1024.0, 512.0, 512.0]  # by the second overflow: hysteresis is 2
        assert scales == (halved if precision == "--fp16" else [1.0] * 5)


def _rate(style: str, samples: float, *, warmup: float, end: float) -> float:
    """Spec 3.3, for lr 1e-2 and min-lr 1e-3; the tail of WSD starts half-way."""
    high, low = 1e-2, 1e-3
    if samples <= warmup:
        return high * samples / warmup
    if style == "constant":
        return high
    if samples > end:
        return low
    if style == "inverse-square-root":
        return max(low, high * math.sqrt(warmup) / math.sqrt(samples))
    ratio = (samples - warmup) / (end - warmup)
    shape = style
    if style.startswith("WSD"):
        shape = style.removeprefix("WSD ")
        if samples <= end / 2:
            return high
        ratio = (samples - end / 2) / (end / 2)
    share = {
        "linear": 1 - ratio,
        "cosine": (1 + math.cos(math.pi * ratio)) / 2,
        "exponential": 2 * 0.5**ratio - 1,
        "minus_sqrt": 1 - math.sqrt(ratio),
    }[shape]
    return low + share * (high - low)


_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_TAILS = ("exponential", "linear", "cosine", "minus_sqrt")


@pytest.mark.timeout(60)
def test_learning_rates_of_every_style(pool: Any) -> None:
    """The rate in effect after each step's samples, through warm-up, decay and beyond its end."""
    base = f"{LLAMA} --num-layers 1 --global-batch-size 2 --train-iters 8 --eval-iters 0"
    base += " --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-iters 6 --lr-decay-style"
    cases = {style: f"{base} {style}" for style in _STYLES}
    for tail_style in _TAILS:
        flags = f"--lr-wsd-decay-style {tail_style} --lr-wsd-decay-iters 3"
        cases[f"WSD {tail_style}"] = f"{base} WSD {flags}"
    for style, history in zip(cases, run(pool, 1, *cases.values()), strict=True):
        for step in history.steps:
            expected = _rate(style, 2 * step.iteration, warmup=4, end=12)
            assert step.learning_rate == pytest.approx(expected, rel=1e-12), (style, step.iteration)


def _frozen_start(
    pre_process: bool = True, post_process: bool = True, stage: StageContext | None = None
) -> GPTModel:
    """The model with its embedding and first layer frozen: all of the first of several stages."""
    model = pretrain_gpt.model_provider(pre_process, post_process, stage)
    for local_name, parameter in model.named_parameters():
        name = model.global_parameter_name(local_name)
        if name.startswith(("embedding.", "decoder.layers.0.")):
            parameter.requires_grad_(False)
    return model


@pytest.mark.timeout(120)
def test_a_frozen_first_stage(pool: Any, tmp_path: Any) -> None:
    """It learns nothing, its rank has no optimizer state, the others train as in one process."""
    case = (
        f"{GPT} --untie-embeddings-and-output-weights --num-layers 2 --global-batch-size 8 "
        "--train-iters 4 --eval-iters 0 --num-layers-per-stage 2 --log-num-zeros-in-grad"
    )
    frozen: dict[str, Any] = {"model_provider": _frozen_start}
    (single,) = run(pool, 1, case, **frozen)
    (trained,) = run(pool, 1, case)
    first, last = single.weights[0], single.weights[-1]
    changed = {name for name in first if first[name] != last[name]}
    expected = {n for n in first if not n.startswith(("embedding.", "decoder.layers.0."))}
    assert changed == expected and trained.weights[-1] != last
    piped = case.replace("--num-layers-per-stage 2", f"{_P2} --num-layers-per-stage 1 1")
    saving = f"{piped} --save {tmp_path} --save-interval 2"
    resumed = f"{piped} --load {tmp_path} --ckpt-step 2"
    for schedule in ("1f1b", "zb-h1"):
        flags = f"--pipeline-schedule {schedule}"
        ours, again = run(pool, 2, f"{saving} {flags}", f"{resumed} {flags}", **frozen)
        assert_same_training(ours, single, schedule)
        assert_same_training(again, tail(single, 3), f"{schedule}, resumed")
