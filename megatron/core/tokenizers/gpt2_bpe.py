"""GPT-2's byte-level BPE, read from a vocabulary and a merges file; needs no other package.

Ids equal those of Hugging Face's GPT-2 tokenizer (but for characters so new that only one of the
two packages knows them to be letters). Any valid Unicode text has ids, and
detokenize(tokenize(text)) is `text`, blanks and NUL included.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from functools import cache

import regex

from .base import MegatronTokenizer, TokenizerError, char_starts, checked_text, existing_file
from .special_tokens import SpecialTokens

END_OF_TEXT = "<|endoftext|>"

# Cuts text into words before BPE; published with GPT-2.
_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

# Words repeat, so their ids are remembered. The table stops growing at a size that holds the
# common words of a corpus, and long words (rarely seen twice) stay out of it.
_REMEMBERED_WORDS = 1 << 17
_REMEMBERED_LENGTH = 64


class GPT2BPETokenizer(MegatronTokenizer):
    """`eod` is `<|endoftext|>`, which is also recognised inside text, as Hugging Face does."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(vocab_file, merge_file)
        self._vocab = _read_vocab(existing_file("--vocab-file", vocab_file))
        self._ranks = _read_merges(existing_file("--merge-file", merge_file))
        self._check_complete(vocab_file, merge_file)
        self._word_ids: dict[str, list[int]] = {}
        end = self._vocab.get(END_OF_TEXT)
        self._specials = SpecialTokens({} if end is None else {END_OF_TEXT: end})
        self._set_special_ids(eod=end, eos=end, bos=end)

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._specials.split(checked_text(text)):
            if piece.special_id is None:
                for word in _WORDS.findall(piece.text):
                    ids += self._ids_of_word(word)
            else:
                ids.append(piece.special_id)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (half a character) come out as U+FFFD."""
        return b"".join(self._bytes_of(ids)).decode("utf-8", errors="replace")

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return char_starts(self._bytes_of(ids), checked_text(text))

    def _ids_of_word(self, word: str) -> list[int]:
        known = self._word_ids.get(word)
        if known is not None:
            return known
        alphabet = byte_alphabet()
        symbols = merge_pairs([alphabet[byte] for byte in word.encode("utf-8")], self._ranks)
        ids = [self._vocab[symbol] for symbol in symbols]
        if len(word) <= _REMEMBERED_LENGTH and len(self._word_ids) < _REMEMBERED_WORDS:
            self._word_ids[word] = ids
        return ids

    def _bytes_of(self, ids: Sequence[int]) -> list[bytes]:
        byte_of = _byte_of_symbol()
        tokens = [self.inv_vocab[number] for number in self._checked_ids(ids)]
        # A token outside the alphabet was added by name; it stands for its own text.
        return [
            bytes(byte_of[c] for c in token) if byte_of.keys() >= set(token) else token.encode()
            for token in tokens
        ]

    def _check_complete(self, vocab_file: str, merge_file: str) -> None:
        """Every symbol that BPE can reach has an id, so that tokenize() cannot fail half-way."""
        reachable = [*byte_alphabet(), *(left + right for left, right in self._ranks)]
        missing = [symbol for symbol in reachable if symbol not in self._vocab]
        if missing:
            raise TokenizerError(
                f"--vocab-file {vocab_file} lacks {len(missing)} symbols that single bytes or "
                f"--merge-file {merge_file} need, the first is {missing[0]!r}; "
                "use the two files of one tokenizer"
            )


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in the vocabulary and merges files.

    Printable Latin-1 characters stand for themselves; the other bytes take, in order, the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def _byte_of_symbol() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(byte_alphabet())}


def merge_pairs(symbols: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Join neighbours, lowest rank first and leftmost among equals, until no pair has a rank.

    Takes O(n log n), so a word of a million characters does not stall preprocessing.
    """
    parts: list[str | None] = list(symbols)  # None: joined to the part on its left
    before = list(range(-1, len(parts) - 1))
    after = list(range(1, len(parts) + 1))
    heap: list[tuple[int, int]] = []  # (rank, index of the left part); some grow stale

    def rank_at(left: int) -> int | None:
        if left < 0 or parts[left] is None or after[left] == len(parts):
            return None
        return ranks.get((parts[left], parts[after[left]]))  # type: ignore[arg-type]

    def offer(left: int) -> None:
        rank = rank_at(left)
        if rank is not None:
            heapq.heappush(heap, (rank, left))

    for left in range(len(parts)):
        offer(left)
    while heap:
        rank, left = heapq.heappop(heap)
        if rank_at(left) != rank:
            continue  # one of the two was joined with something else in the meantime
        right = after[left]
        parts[left] = f"{parts[left]}{parts[right]}"
        parts[right] = None
        after[left] = after[right]
        if after[left] < len(parts):
            before[after[left]] = left
        offer(before[left])
        offer(left)
    return [part for part in parts if part is not None]


def _read_vocab(path: str) -> dict[str, int]:
    try:
        with open(path, encoding="utf-8") as file:
            vocab = json.load(file)
    except ValueError as error:  # not UTF-8, or not JSON
        raise TokenizerError(
            f"--vocab-file {path} is not JSON ({error}); give GPT-2's vocab.json"
        ) from error
    if not isinstance(vocab, dict) or sorted(map(str, vocab.values())) != sorted(
        map(str, range(len(vocab)))
    ):
        raise TokenizerError(
            f"--vocab-file {path} must map each token to an id, with ids 0, 1, 2, ... used once; "
            "give GPT-2's vocab.json"
        )
    return vocab


def _read_merges(path: str) -> dict[tuple[str, str], int]:
    """Pair -> rank. A first line `#version: ...` and blank lines hold no pair."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")  # not splitlines(): it also cuts at other characters
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"--merge-file {path} is not UTF-8 text ({error}); give GPT-2's merges.txt"
        ) from error
    ranks: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(
                f"--merge-file {path} line {number} is {line!r:.60}; a line holds two symbols "
                "with a blank between them; give GPT-2's merges.txt"
            )
        ranks.setdefault((pair[0], pair[1]), len(ranks))
    return ranks
