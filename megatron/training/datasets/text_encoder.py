"""One line of a JSON-lines file -> the tokens of its documents."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed_dataset import DType


class PreprocessError(ValueError):
    """Preprocessing cannot go on; the message says where and why."""


class BadLineError(ValueError):
    """A line that holds no document, for a reason that many lines can share."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> Sequence[int]: ...


class Line(NamedTuple):
    """A line of an input file; numbers count from 1."""

    path: str
    number: int
    content: bytes

    @property
    def place(self) -> str:
        return f"{self.path} line {self.number}"


class Document(NamedTuple):
    """Tokens of all sequences of a document, and the length of each."""

    tokens: NDArray[Any]
    lengths: list[int]


class TextEncoder:
    """Turns lines into documents, one for each key.

    A key's value is a string or a list of strings; each string is one sequence, or as many as
    `split` makes of it. Strings without tokens are dropped; with `append_eod` the last sequence
    ends with the end token, unless the document has no token at all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: Sequence[str],
        *,
        append_eod: bool = False,
        split: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self._eod = [tokenizer.eod] if append_eod else []
        self._split = split
        self._vocab_size = tokenizer.vocab_size
        self._dtype = DType.optimal_dtype(self._vocab_size)

    def encode(self, line: Line) -> list[Document]:
        """One document per key. Raises BadLineError for a line without them, PreprocessError where
        the tokenizer does not fit the text."""
        values = _parse(line)
        return [self._encode_strings(self._strings_of(values, key), line) for key in self._keys]

    def _strings_of(self, values: dict[str, Any], key: str) -> list[str]:
        if key not in values:
            raise BadLineError(f"has no key {key!r}")
        value = values[key]
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise BadLineError(f"has under {key!r} neither a string nor a list of strings")
        for text in strings:
            try:
                text.encode()
            except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
                raise BadLineError(
                    f"has under {key!r} a lone surrogate, which is no text"
                ) from None
        if self._split is not None and isinstance(value, str):
            return self._split(value)
        return strings

    def _encode_strings(self, strings: list[str], line: Line) -> Document:
        ids: list[int] = []
        lengths: list[int] = []
        for text in strings:
            try:
                tokens = self._tokenizer.tokenize(text)
            except ValueError as error:
                raise PreprocessError(f"{line.place} cannot be tokenized: {error}") from error
            if len(tokens):
                ids.extend(tokens)
                lengths.append(len(tokens))
        if ids and self._eod:
            ids += self._eod
            lengths[-1] += 1
        return Document(self._checked(ids, line), lengths)

    def _checked(self, ids: list[int], line: Line) -> NDArray[Any]:
        tokens = np.asarray(ids, np.int64)
        outside = (tokens < 0) | (tokens >= self._vocab_size)
        if outside.any():
            raise PreprocessError(
                f"{line.place}: token id {tokens[outside][0]} is outside the vocabulary of "
                f"{self._vocab_size}; --tokenizer-model, --vocab-file or --vocab-size do not fit"
            )
        return tokens.astype(self._dtype)


def _parse(line: Line) -> dict[str, Any]:
    content = line.content
    if line.number == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        raise BadLineError("is blank")
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError:
        raise BadLineError("is not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadLineError("is not JSON") from None
    if not isinstance(value, dict):
        raise BadLineError("is not a JSON object")
    return value
