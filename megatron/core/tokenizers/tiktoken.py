"""Byte-level BPE through the `tiktoken` package, from a JSON file with one object a token.

Special ids come first: `tiktoken_num_special_tokens` low ids are special, the named ones first
and `<SPECIAL_i>` for the rest; the file's ranks follow, shifted by that count.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from .base import MegatronTokenizer, TokenizerError, char_starts, checked_text, existing_file
from .special_tokens import SpecialTokens

_NAMED_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_ROLES = {
    "bos": "<s>",
    "eos": "</s>",
    "eod": "</s>",
    "mask": "<mask>",
    "pad": "<pad>",
    "cls": "<cls>",
    "sep": "<sep>",
}

# How text is cut into words before BPE. v2 also cuts where lower case turns to upper case.
_TAIL = r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PATTERNS = {
    "v1": rf"{_LEAD}\p{{L}}+{_TAIL}",
    "v2": rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
}


class TikTokenizer(MegatronTokenizer):
    """`eod` is `</s>`. Named special tokens are recognised inside text, as in Megatron-LM today."""

    def __init__(
        self,
        tokenizer_model: str,
        *,
        vocab_size: int = 1 << 17,
        tiktoken_pattern: str = "v2",
        tiktoken_num_special_tokens: int = 1000,
        tiktoken_special_tokens: Sequence[str] = _NAMED_SPECIALS,
    ) -> None:
        named = list(tiktoken_special_tokens)
        super().__init__(
            tokenizer_model,
            vocab_size=vocab_size,
            pattern=tiktoken_pattern,
            num_special_tokens=tiktoken_num_special_tokens,
            special_tokens=named,
        )
        _check_options(vocab_size, tiktoken_pattern, tiktoken_num_special_tokens, named)
        self._vocab_size = vocab_size
        self._shift = tiktoken_num_special_tokens
        # Low ids are the most frequent tokens, so a smaller vocabulary takes the first of them.
        self._tokens = _read_tokens(tokenizer_model)[: vocab_size - self._shift]
        self._model = _load_tiktoken().Encoding(
            "megatron",
            pat_str=_PATTERNS[tiktoken_pattern],
            mergeable_ranks={piece: rank for rank, (piece, _) in enumerate(self._tokens)},
            special_tokens={},
        )
        fillers = [f"<SPECIAL_{index}>" for index in range(len(named), self._shift)]
        self._special_names = [*named, *fillers]
        self._specials = SpecialTokens({name: number for number, name in enumerate(named)})
        self._set_special_ids(
            **{role: self._specials.ids.get(name) for role, name in _ROLES.items()}
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {token: number for number, token in self.inv_vocab.items()}

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        names = [*self._special_names, *(text for _, text in self._tokens)]
        return dict(enumerate(names))

    def tokenize(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = [self.bos] if bos else []
        for piece in self._specials.split(checked_text(text)):
            if piece.special_id is None:
                ids += [self._shift + rank for rank in self._model.encode_ordinary(piece.text)]
            else:
                ids.append(piece.special_id)
        return [*ids, self.eos] if eos else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (half a character) come out as U+FFFD."""
        return b"".join(self._bytes_of(ids)).decode("utf-8", errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return char_starts(self._bytes_of(ids), checked_text(text))

    def _bytes_of(self, ids: Sequence[int]) -> list[bytes]:
        pieces: list[bytes] = []
        for number in self._checked_ids(ids):
            rank = number - self._shift
            if rank >= len(self._tokens):
                raise TokenizerError(
                    f"id {number} has no token: the model file holds {len(self._tokens)} tokens "
                    f"after {self._shift} special ids, though --vocab-size is {self._vocab_size}"
                )
            special = rank < 0
            pieces.append(
                self._special_names[number].encode() if special else self._tokens[rank][0]
            )
        return pieces


def _check_options(vocab_size: int, pattern: str, num_special: int, named: list[str]) -> None:
    if pattern not in _PATTERNS:
        raise TokenizerError(
            f"--tiktoken-pattern {pattern} is not known; choose from {', '.join(_PATTERNS)}"
        )
    if len(set(named)) != len(named) or not all(named):
        raise TokenizerError(
            f"--tiktoken-special-tokens {' '.join(named)} holds an empty or repeated name; "
            "name each token once"
        )
    if num_special < len(named):
        raise TokenizerError(
            f"--tiktoken-num-special-tokens {num_special} is less than the {len(named)} names "
            "of --tiktoken-special-tokens; use at least as many"
        )
    if vocab_size < num_special + 256:
        raise TokenizerError(
            f"--vocab-size {vocab_size} leaves no room for the 256 bytes after "
            f"--tiktoken-num-special-tokens {num_special}; use at least {num_special + 256}"
        )


def _load_tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise TokenizerError(
            "--tokenizer-type TikTokenizer needs the package tiktoken, which is not there "
            f"({error}); `pip install tiktoken` mends it"
        ) from error
    return tiktoken


def _read_tokens(path: str) -> list[tuple[bytes, str]]:
    """Bytes and text of each token, in the order of their ranks."""
    existing_file("--tokenizer-model", path)
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        tokens = {
            int(entry["rank"]): (
                base64.b64decode(entry["token_bytes"], validate=True),
                str(entry["token_str"]),
            )
            for entry in entries
        }
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"--tokenizer-model {path} is not a tiktoken vocabulary: a JSON list of objects with "
            f"rank, token_bytes (base64) and token_str ({type(error).__name__}: {error})"
        ) from error
    ordered = [tokens[rank] for rank in sorted(tokens)]
    single_bytes = {piece for piece, _ in ordered[:256] if len(piece) == 1}
    if sorted(tokens) != list(range(len(entries))) or len(single_bytes) != 256:
        raise TokenizerError(
            f"--tokenizer-model {path} must hold ranks 0, 1, 2, ... each once, the 256 single "
            "bytes first; the file is incomplete"
        )
    return ordered
