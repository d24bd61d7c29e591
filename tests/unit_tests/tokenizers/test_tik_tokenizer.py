"""TikTokenizer: its file, its options, its ids.

Each test runs with a stand-in for the package tiktoken, and with the package where it is installed.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import types
from pathlib import Path

import pytest
import regex

from megatron.core.tokenizers import MegatronTokenizer, TokenizerError, build_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> str:
    """256 bytes and three merges."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell"]
    entries = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(piece).decode(),
            "token_str": piece.decode("utf-8", errors="replace"),
        }
        for rank, piece in enumerate(pieces)
    ]
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(entries))
    return str(path)


class PlainEncoding:
    """What TikTokenizer needs of `tiktoken.Encoding`, written for clarity instead of speed."""

    def __init__(
        self,
        name: str,
        *,
        pat_str: str,
        mergeable_ranks: dict[bytes, int],
        special_tokens: dict[str, int],
    ) -> None:
        self._words = regex.compile(pat_str)
        self._ranks = mergeable_ranks

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words.findall(text):
            parts = [bytes([byte]) for byte in word.encode()]
            while joins := {
                self._ranks[left + right]: index
                for index, (left, right) in reversed([*enumerate(itertools.pairwise(parts))])
                if left + right in self._ranks
            }:
                index = joins[min(joins)]
                parts[index : index + 2] = [parts[index] + parts[index + 1]]
            ids += [self._ranks[part] for part in parts]
        return ids


@pytest.fixture(params=["stand-in", "package"], autouse=True)
def tiktoken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "package":
        pytest.importorskip("tiktoken")
        return
    module = types.ModuleType("tiktoken")
    module.Encoding = PlainEncoding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiktoken", module)


def build(model: str, **options: object) -> MegatronTokenizer:
    return build_tokenizer("TikTokenizer", tokenizer_model=model, **options)  # type: ignore[arg-type]


def test_special_ids_come_first(model: str) -> None:
    tokenizer = build(model, tiktoken_num_special_tokens=10)
    assert tokenizer.vocab_size == 1 << 17
    names = [tokenizer.inv_vocab[number] for number in range(10)]
    assert names[:7] == ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    assert names[7:] == ["<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"]
    assert tokenizer.tokenize("hello") == [10 + 258, 10 + ord("o")]
    assert tokenizer.tokenize("a</s>") == [10 + ord("a"), 2]
    assert (tokenizer.eod, tokenizer.eos, tokenizer.bos, tokenizer.pad) == (2, 2, 1, 4)
    assert tokenizer.tokenize("a", bos=True, eos=True) == [1, 10 + ord("a"), 2]  # type: ignore[call-arg]


def test_default_shift_is_a_thousand(model: str) -> None:
    assert build(model).tokenize("a") == [1000 + ord("a")]


def test_a_smaller_vocabulary_takes_the_first_ranks(model: str) -> None:
    tokenizer = build(model, tiktoken_num_special_tokens=10, vocab_size=10 + 258)
    assert tokenizer.vocab_size == 268
    assert tokenizer.tokenize("hell") == [10 + 256, 10 + 257]  # "he" and "ll", but no "hell"


@pytest.mark.parametrize(("pattern", "count"), [("v1", 1), ("v2", 2)])
def test_patterns_differ_at_a_capital_letter(model: str, pattern: str, count: int) -> None:
    """v1 takes "xhE" as one word; v2 starts a new word at a capital, so "lL" never meets."""
    entries = json.loads(Path(model).read_text())
    entries.append({"rank": 259, "token_bytes": "bEw=", "token_str": "lL"})
    Path(model).write_text(json.dumps(entries))
    assert len(build(model, tiktoken_pattern=pattern).tokenize("lL")) == count


@pytest.mark.parametrize("text", ["", " \t\n ", "a\x00b", "naïve 你好 😀<s>x"])
def test_round_trip_and_offsets(model: str, text: str) -> None:
    tokenizer = build(model)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    starts = tokenizer.offsets(ids, text)
    assert len(starts) == len(ids) and starts == sorted(starts)
    if "<s>" in text:
        assert starts[ids.index(tokenizer.bos)] == text.index("<s>")


def test_hostile_input_is_refused(model: str) -> None:
    tokenizer = build(model)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.tokenize("\ud800")
    with pytest.raises(TokenizerError, match="id 5000 has no token"):
        tokenizer.detokenize([5000])


def test_without_the_package_the_error_names_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(TokenizerError, match=r"needs the package tiktoken.*pip install tiktoken"):
        build(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiktoken_pattern": "v3"}, "--tiktoken-pattern v3 is not known; choose from v1, v2"),
        ({"tiktoken_num_special_tokens": 3}, "--tiktoken-num-special-tokens 3 is less than the 7"),
        ({"tiktoken_special_tokens": ["a", "a"]}, "holds an empty or repeated name"),
        ({"vocab_size": 1000}, "--vocab-size 1000 leaves no room .* use at least 1256"),
    ],
)
def test_bad_options(model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build(model, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must hold ranks 0, 1, 2"),
        ("[1]", "not a tiktoken vocabulary"),
        ("nonsense", "not a tiktoken vocabulary"),
        ('[{"rank": 0}]', "KeyError: 'token_bytes'"),
        ('[{"rank": 0, "token_bytes": "?", "token_str": "a"}]', "not a tiktoken vocabulary"),
        ('[{"rank": 1, "token_bytes": "YQ==", "token_str": "a"}]', "must hold ranks 0, 1, 2"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        build(str(tmp_path / "bad.json"))
