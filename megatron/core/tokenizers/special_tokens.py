"""Special strings, such as `<|endoftext|>`, that stand for one id wherever they occur in text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of a text: ordinary text, or one special token if `special_id` is set."""

    text: str
    start: int  # in characters
    special_id: int | None


class SpecialTokens:
    """A table of special strings that cuts text at them."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self.names = {number: name for name, number in self.ids.items()}
        # Longest first: of two special strings that start at one place the longer is meant.
        alternatives = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, alternatives))) if alternatives else None

    def split(self, text: str) -> Iterator[Piece]:
        """The pieces of `text` in order; empty ones are left out."""
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > start:
                yield Piece(text[start : match.start()], start, None)
            yield Piece(match[0], match.start(), self.ids[match[0]])
            start = match.end()
        if start < len(text):
            yield Piece(text[start:], start, None)
