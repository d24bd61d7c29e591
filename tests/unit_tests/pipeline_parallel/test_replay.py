"""Data for forwards that run a second time."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.zerobubble.runtime.replay import ReplayIterator


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_gives_the_same_items_again_and_then_goes_on(taken: int) -> None:
    """The source itself is asked for no item twice, and for none ahead of time."""
    source = iter([object() for _ in range(5)])
    replay = ReplayIterator(source)
    first = [next(replay) for _ in range(taken)]
    replay.start_again()
    again = list(replay)
    assert all(a is b for a, b in zip(first, again, strict=False)) and len(again) == 5
    assert next(source, None) is None


def test_the_source_is_left_where_the_reader_was() -> None:
    source = iter(range(9))
    replay = ReplayIterator(source)
    assert [next(replay), next(replay)] == [0, 1]
    replay.start_again()
    assert [next(replay) for _ in range(3)] == [0, 1, 2]
    assert next(source) == 3
