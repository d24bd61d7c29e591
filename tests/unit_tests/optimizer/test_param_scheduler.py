"""Learning-rate and weight-decay curves, from their formulas (spec section 3.3)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def _scheduler(**changes: Any) -> OptimizerParamScheduler:
    options: dict[str, Any] = {
        "init_lr": 0.1,
        "max_lr": 1.0,
        "min_lr": 0.2,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 110,
        "lr_decay_style": "linear",
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    return OptimizerParamScheduler(optimizer, **{**options, **changes})


def _lr_at(scheduler: OptimizerParamScheduler, samples: int) -> float:
    scheduler.num_steps = samples
    return scheduler.get_lr({})


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", 1.0),
        ("linear", 0.2 + 0.75 * 0.8),
        ("cosine", 0.2 + 0.5 * (math.cos(math.pi * 0.25) + 1) * 0.8),
        ("inverse-square-root", math.sqrt(10) / math.sqrt(35)),
    ],
)
def test_decay_styles_a_quarter_of_the_way(style: str, expected: float) -> None:
    assert _lr_at(_scheduler(lr_decay_style=style), 35) == pytest.approx(expected)


def test_warm_up_is_linear_and_the_end_is_the_floor() -> None:
    scheduler = _scheduler()
    assert [_lr_at(scheduler, s) for s in (0, 5, 10)] == pytest.approx([0.1, 0.55, 1.0])
    assert _lr_at(scheduler, 110) == pytest.approx(0.2)
    assert _lr_at(scheduler, 111) == 0.2


@pytest.mark.parametrize(
    ("tail", "share"),
    [
        ("exponential", 2 * 0.5**0.5 - 1),
        ("linear", 0.5),
        ("cosine", 0.5),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_flat_then_falls_over_its_tail(tail: str, share: float) -> None:
    scheduler = _scheduler(lr_decay_style="WSD", wsd_decay_steps=40, lr_wsd_decay_style=tail)
    assert _lr_at(scheduler, 70) == 1.0
    assert _lr_at(scheduler, 90) == pytest.approx(0.2 + share * 0.8)


@pytest.mark.parametrize(("style", "share"), [("linear", 0.25), ("cosine", 0.14644660940672627)])
def test_weight_decay_grows(style: str, share: float) -> None:
    scheduler = _scheduler(start_wd=0.0, end_wd=0.4, wd_incr_style=style)
    scheduler.step(25)
    groups = scheduler.optimizer.param_groups
    assert groups[0]["weight_decay"] == pytest.approx(share * 0.4)
    assert groups[1]["weight_decay"] == 0.0  # norms and biases


def test_a_group_may_have_its_own_rates() -> None:
    scheduler = _scheduler()
    scheduler.num_steps = 10
    assert scheduler.get_lr({"max_lr": 3.0, "min_lr": 0.0}) == 3.0


def test_position_is_restored_and_a_difference_needs_a_flag() -> None:
    saved = _scheduler()
    saved.step(35)
    state = saved.state_dict()
    same = _scheduler(use_checkpoint_opt_param_scheduler=False)
    same.load_state_dict(state)
    assert same.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"max_lr is 2\.0 .* 1\.0 in the checkpoint"):
        other = _scheduler(max_lr=2.0, use_checkpoint_opt_param_scheduler=False)
        other.load_state_dict(state)
    overriding = _scheduler(max_lr=2.0, override_opt_param_scheduler=True)
    overriding.load_state_dict(state)
    assert (overriding.max_lr, overriding.num_steps) == (2.0, 35)
    following = _scheduler(max_lr=2.0)
    following.load_state_dict(state)
    assert following.max_lr == 1.0


def test_bad_styles_and_a_warm_up_past_the_decay_are_refused() -> None:
    with pytest.raises(ValueError, match="--lr-decay-style wavy"):
        _scheduler(lr_decay_style="wavy")
    with pytest.raises(ValueError, match="warm-up of 110 samples"):
        _scheduler(lr_warmup_steps=110)


def test_a_longer_run_with_constant_weight_decay_needs_no_flag() -> None:
    saved = _scheduler()
    saved.step(35)
    longer = _scheduler(wd_incr_steps=500, use_checkpoint_opt_param_scheduler=False)
    longer.load_state_dict(saved.state_dict())
    assert (longer.num_steps, longer.wd_incr_steps) == (35, 500)
    growing = _scheduler(
        start_wd=0.0, wd_incr_style="linear", use_checkpoint_opt_param_scheduler=False
    )
    state = growing.state_dict() | {"wd_incr_steps": 7}
    with pytest.raises(ValueError, match="wd_incr_steps is 100"):
        growing.load_state_dict(state)
