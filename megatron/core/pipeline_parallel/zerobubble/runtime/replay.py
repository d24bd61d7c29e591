"""Data that can be read again: for forwards that have to be run a second time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class ReplayIterator:
    """Keeps what it gives out, for one iteration, and gives it out again if asked to."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: deque[Any] = deque()
        self._again: deque[Any] = deque()

    def __iter__(self) -> ReplayIterator:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._source)
        self._given.append(item)
        return item

    def start_again(self) -> None:
        """Give out once more what was given, then go on."""
        self._again, self._given = self._given, deque()
