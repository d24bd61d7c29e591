"""One line in, documents or a reason out."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron.training.datasets.sentences import sentence_splitter
from megatron.training.datasets.text_encoder import (
    BadLineError,
    Line,
    PreprocessError,
    TextEncoder,
)


class _Tokenizer:
    """Ids are numbers in the text."""

    eod = 99

    def __init__(self, vocab_size: int = 100) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def _encode(
    content: bytes | dict[str, Any], *, keys: list[str] | None = None, number: int = 1, **opts: Any
) -> list[tuple[list[int], list[int]]]:
    if isinstance(content, dict):
        content = json.dumps(content).encode()
    encoder = TextEncoder(opts.pop("tokenizer", _Tokenizer()), keys or ["text"], **opts)
    documents = encoder.encode(Line("in.jsonl", number, content))
    return [(document.tokens.tolist(), document.lengths) for document in documents]


@pytest.mark.parametrize(
    ("value", "plain", "with_eod"),
    [
        ("1 2", ([1, 2], [2]), ([1, 2, 99], [3])),
        (["1 2", "3"], ([1, 2, 3], [2, 1]), ([1, 2, 3, 99], [2, 2])),
        (["1", "", "2 3"], ([1, 2, 3], [1, 2]), ([1, 2, 3, 99], [1, 3])),
        ("", ([], []), ([], [])),
        ([], ([], []), ([], [])),
        (["", ""], ([], []), ([], [])),
    ],
)
def test_documents(value: Any, plain: Any, with_eod: Any) -> None:
    assert _encode({"text": value}) == [plain]
    assert _encode({"text": value}, append_eod=True) == [with_eod]


def test_each_key_is_a_document() -> None:
    line = {"a": "1", "unused": 5, "b": ["2", "3"]}
    assert _encode(line, keys=["b", "a"]) == [([2, 3], [1, 1]), ([1], [1])]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    content = b'\xef\xbb\xbf{"text": "1"}\r\n'
    assert _encode(content) == [([1], [1])]
    with pytest.raises(BadLineError, match="is not JSON"):
        _encode(content, number=2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n", "is blank"),
        (b" \t\r\n", "is blank"),
        (b"", "is blank"),
        (b'{"text": "1\n', "is not JSON"),
        (b"text\n", "is not JSON"),
        (b'{"text": "1"} {"text": "2"}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'"text"', "is not a JSON object"),
        (b'["text"]', "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"Text": "1"}', "has no key 'text'"),
        (b'{"text": null}', "has under 'text' neither a string nor a list of strings"),
        (b'{"text": 1}', "has under 'text' neither a string nor a list of strings"),
        (b'{"text": {"a": "1"}}', "has under 'text' neither a string nor a list of strings"),
        (b'{"text": ["1", 2]}', "has under 'text' neither a string nor a list of strings"),
        (b'{"text": "\\ud800"}', "has under 'text' a lone surrogate, which is no text"),
    ],
    ids=range(18),
)
def test_bad_lines(content: bytes, reason: str) -> None:
    with pytest.raises(BadLineError, match=f"^{re.escape(reason)}$"):
        _encode(content)


@pytest.mark.parametrize(("text", "wrong"), [("1 100", 100), ("-1", -1)])
def test_ids_outside_the_vocabulary_end_the_work(text: str, wrong: int) -> None:
    message = f"in.jsonl line 7: token id {wrong} is outside the vocabulary of 100"
    with pytest.raises(PreprocessError, match=message):
        _encode({"text": text}, number=7)


def test_text_that_the_tokenizer_refuses_ends_the_work() -> None:
    with pytest.raises(PreprocessError, match=r"in\.jsonl line 7 cannot be tokenized: .*'one'"):
        _encode({"text": "one"}, number=7)


@pytest.mark.parametrize(("size", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_token_type_follows_the_vocabulary(size: int, dtype: type) -> None:
    encoder = TextEncoder(_Tokenizer(size), ["text"])
    (document,) = encoder.encode(Line("in.jsonl", 1, b'{"text": "5"}'))
    assert document.tokens.dtype == dtype


class _Punkt:
    """Sentences end with a full stop."""

    def __init__(self, language: str) -> None:
        if language != "english":
            raise LookupError(language)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"[^\s.][^.]*\.", text)]


@pytest.fixture
def nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nltk, which the tests do without."""
    module, tokenize = ModuleType("nltk"), ModuleType("nltk.tokenize")
    tokenize.PunktTokenizer = _Punkt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nltk", module)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", tokenize)


@pytest.mark.usefixtures("nltk")
def test_sentences() -> None:
    text = " One.  Two\nthree.\n\nFour.\n"
    split = sentence_splitter("english", keep_newlines=False)
    assert split(text) == ["One.", "Two\nthree.", "Four."]
    keep = sentence_splitter("english", keep_newlines=True)
    assert keep(text) == [" One.  ", "Two\nthree.\n\n", "Four.\n"]
    assert keep("") == split("") == []
    with pytest.raises(PreprocessError, match=r"--lang klingon; .*nltk\.downloader punkt_tab"):
        sentence_splitter("klingon", keep_newlines=False)


@pytest.mark.usefixtures("nltk")
def test_strings_are_split_and_lists_are_not() -> None:
    class Words(_Tokenizer):
        def tokenize(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    split = sentence_splitter("english", keep_newlines=False)
    options: dict[str, Any] = {"tokenizer": Words(), "split": split, "append_eod": True}
    assert _encode({"text": "a bb. ccc."}, **options) == [([1, 3, 4, 99], [2, 2])]
    assert _encode({"text": ["a bb. ccc."]}, **options) == [([1, 3, 4, 99], [4])]


def test_missing_nltk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(PreprocessError, match="--split-sentences needs nltk"):
        sentence_splitter("english", keep_newlines=False)
