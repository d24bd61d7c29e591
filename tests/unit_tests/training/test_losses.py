"""From what loss functions return to the number in the log."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.training.losses import LossMeter


def _means(*reported: dict) -> dict[str, float]:
    meter = LossMeter(None)
    meter.add(reported)
    return meter.means()


def test_sums_are_divided_by_counts_over_all_micro_batches() -> None:
    """Not an average of averages: the second micro-batch has a third of the tokens."""
    first = {"lm loss": torch.tensor([30.0, 15.0])}
    second = {"lm loss": (torch.tensor(20.0), torch.tensor(5))}
    assert _means(first, second) == {"lm loss": 2.5}


def test_a_number_counts_once() -> None:
    assert _means({"aux": torch.tensor(1.0)}, {"aux": 2}, {"aux": torch.tensor([6.0])}) == {
        "aux": 3.0
    }


def test_names_are_kept_apart_and_in_order() -> None:
    means = _means({"b": 1.0, "a": torch.tensor([4.0, 2.0])}, {"b": 3.0, "a": [0.0, 2.0]})
    assert list(means.items()) == [("b", 2.0), ("a", 1.0)]


def test_without_losses_or_tokens_there_is_no_division() -> None:
    assert _means() == {}
    assert _means({"lm loss": torch.tensor([0.0, 0.0])}) == {"lm loss": 0.0}


def test_what_is_not_a_number_is_shown() -> None:
    means = _means({"lm loss": torch.tensor([float("nan"), 1.0])}, {"lm loss": [1.0, 1.0]})
    assert means["lm loss"] != means["lm loss"]


def test_many_tokens_are_counted_exactly() -> None:
    """An evaluation has more tokens than fp32 can count in odd steps (2**24)."""
    batch = {"lm loss": torch.tensor([2.0 * 8_388_609, 8_388_609.0])}
    assert _means(*[batch] * 7) == {"lm loss": 2.0}
    ones = {"lm loss": torch.tensor([16_777_216.0, 16_777_216.0])}
    one = {"lm loss": torch.tensor([1.0, 1.0])}
    meter = LossMeter(None)
    meter.add([ones, one])
    assert meter._totals["lm loss"].tolist() == [16_777_217.0] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_losses_of_every_precision_add_up_in_fp64(dtype: torch.dtype) -> None:
    values = [torch.tensor([0.1, 1.0], dtype=dtype)] * 3
    exact = float(torch.tensor(0.1, dtype=dtype))
    assert _means(*({"lm loss": value} for value in values))["lm loss"] == pytest.approx(
        exact, rel=1e-15
    )


def test_the_graph_of_a_loss_is_not_kept() -> None:
    """A user's loss function may return the loss itself, with everything that led to it."""
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    alive = weakref.ref(hidden)
    meter = LossMeter(None)
    meter.add([{"lm loss": hidden.sum()}])
    del hidden
    gc.collect()
    assert alive() is None
    assert meter.means() == {"lm loss": 6.0}
