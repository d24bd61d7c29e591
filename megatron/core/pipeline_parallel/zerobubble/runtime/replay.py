"""Data that can be read again: for forwards that have to be run a second time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class ReplayIterator:
    """Keeps what it gives out, until it is told to start again or that it need not."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: deque[Any] | None = deque()  # None: nothing is kept any more
        self._again: deque[Any] = deque()

    def __iter__(self) -> ReplayIterator:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._source)
        if self._given is not None:
            self._given.append(item)
        return item

    def start_again(self) -> None:
        """Give out once more what was given, then go on."""
        assert self._given is not None, "what was given is not kept any more"
        self._again, self._given = self._given, None

    def forget(self) -> None:
        """Keep nothing from now on."""
        self._given = None
