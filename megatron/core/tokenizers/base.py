"""What every tokenizer is: ids from text and back, and the special ids that training needs.

Text that all tokenizers treat alike: the empty string gives no ids (only those that were asked
for, such as BOS); a NUL is a character like any other; a lone surrogate, which JSON can spell as
"\\ud800" but UTF-8 cannot, is refused with its position, so that a caller can skip the document.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np


class TokenizerError(ValueError):
    """A tokenizer cannot be built or used as asked; the message says why and how to mend it."""


class MissingTokenError(TokenizerError, AttributeError):
    """The tokenizer has no such special token.

    Also an AttributeError, so that `hasattr(tokenizer, "pad")` and `getattr(tokenizer, "pad", -1)`
    answer as a reader expects.
    """


class MegatronTokenizer(abc.ABC):
    """Base class of all tokenizers.

    `tokenizer_paths` and `tokenizer_options` are what the tokenizer was made from. They become
    `unique_identifiers`, which data set caches are keyed by, so options must be JSON-able.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "tokenizer_path": list(tokenizer_paths),
            **tokenizer_options,
        }
        self._special_ids: dict[str, int] = {}

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, before padding; every id is below it."""

    @property
    @abc.abstractmethod
    def vocab(self) -> dict[str, int]:
        """Token text -> id."""

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id -> token text."""
        return {number: token for token, number in self.vocab.items()}

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`. Raises TokenizerError for text that is not valid Unicode."""

    @abc.abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Raises TokenizerError for an id outside the vocabulary."""

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Position in `text` (in characters) where each of `ids` = tokenize(text) starts."""
        raise TokenizerError(f"{type(self).__name__} cannot tell where its tokens start in a text")

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        return self._special_id("eod")

    @property
    def pad(self) -> int:
        """Id of padding; -1 where the tokenizer's family marks "no padding" that way."""
        return self._special_id("pad")

    @property
    def bos(self) -> int:
        """Id that begins a sequence."""
        return self._special_id("bos")

    @property
    def eos(self) -> int:
        """Id that ends a sequence."""
        return self._special_id("eos")

    @property
    def cls(self) -> int:
        """Id of the classification token."""
        return self._special_id("cls")

    @property
    def sep(self) -> int:
        """Id of the separator token."""
        return self._special_id("sep")

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        return self._special_id("mask")

    def _set_special_ids(self, **ids: int | None) -> None:
        """Say which special ids exist; None stands for "this vocabulary has none"."""
        self._special_ids = {role: number for role, number in ids.items() if number is not None}

    def _special_id(self, role: str) -> int:
        if role in self._special_ids:
            return self._special_ids[role]
        made_from = ", ".join(self.unique_identifiers["tokenizer_path"])
        name = type(self).__name__ + (f" ({made_from})" if made_from else "")
        raise MissingTokenError(
            f"{name} has no {role} token; use a tokenizer that has one, or do without"
            + (" the end-of-document token (--append-eod)" if role == "eod" else "")
        )

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        """`ids` as plain integers. Raises TokenizerError for one outside the vocabulary."""
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size:
                raise TokenizerError(
                    f"id {number} is outside the vocabulary of {type(self).__name__}; "
                    f"ids are 0 to {self.vocab_size - 1}"
                )
        return numbers


def checked_text(text: str) -> str:
    """`text` itself. Raises TokenizerError if it is no text or holds a lone surrogate."""
    if not isinstance(text, str):
        raise TokenizerError(f"a tokenizer takes text, not {type(text).__name__}: {text!r:.60}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate "
            f"{text[error.start]!r}; drop or replace it first"
        ) from error
    return text


def existing_file(flag: str, path: str) -> str:
    """`path` itself. Raises TokenizerError, naming the flag, if no file is there."""
    if not os.path.isfile(path):
        raise TokenizerError(f"{flag} {path} is not a file; give the path of an existing file")
    return path


def char_starts(pieces: Sequence[bytes], text: str) -> list[int]:
    """Where each of `pieces`, which spell `text` in UTF-8, starts, in characters.

    A piece that starts inside a character is said to start where that character does.
    """
    encoded = text.encode("utf-8")
    if b"".join(pieces) != encoded:
        raise not_of_this_text()
    first_bytes = (np.frombuffer(encoded, dtype=np.uint8) & 0xC0) != 0x80
    char_of_byte = np.cumsum(first_bytes) - 1
    byte_starts = np.cumsum([0] + [len(piece) for piece in pieces])[:-1]
    return char_of_byte[byte_starts].tolist()


def not_of_this_text() -> TokenizerError:
    """The error of `offsets` for ids that do not belong to the text."""
    return TokenizerError("these ids are not the tokens of this text; pass ids = tokenize(text)")
