"""Tokenizers over a SentencePiece model file.

White space, NUL and characters that the model has never seen go through the model's own
normalisation: one trained with SentencePiece's defaults drops leading, trailing and repeated
white space (so blank text gives no ids) and has `unk` for what it does not know; Llama's keeps
every blank and falls back to bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import sentencepiece

from .base import (
    MegatronTokenizer,
    TokenizerError,
    checked_text,
    existing_file,
    not_of_this_text,
)
from .special_tokens import SpecialTokens


class GPTSentencePieceTokenizer(MegatronTokenizer):
    """The model's ids and nothing else: no BOS or EOS is added. `eod` is the model's EOS."""

    def __init__(self, tokenizer_model: str) -> None:
        super().__init__(tokenizer_model)
        self._model = _load_model(tokenizer_model)
        bos, eos = (_id_or_none(number) for number in (self._model.bos_id(), self._model.eos_id()))
        # Megatron's convention for this family: pad is -1 when the model has none.
        self._set_special_ids(bos=bos, eos=eos, eod=eos, pad=self._model.pad_id())

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    @cached_property
    def vocab(self) -> dict[str, int]:
        return _pieces_of(self._model)

    def tokenize(self, text: str) -> list[int]:
        return self._model.encode(checked_text(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._model.decode(self._checked_ids(ids))

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        own_ids, starts = _encode_with_starts(self._model, checked_text(text))
        if list(ids) != own_ids:
            raise not_of_this_text()
        return starts


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """As GPTSentencePieceTokenizer, with BOS and EOS on request.

    Megatron-LM of mid-2024 put BOS before every text; today's, and ours, only when asked.
    """

    def tokenize(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        ids = super().tokenize(text)
        if bos:
            ids = [self.bos, *ids]
        return [*ids, self.eos] if eos else ids


class SentencePieceTokenizer(MegatronTokenizer):
    """T5's vocabulary: the model's ids, then special tokens that are recognised inside text.

    In this order, each only if the model lacks it: `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, the names
    of pad, bos and eos, and `<extra_id_0>` to `<extra_id_{vocab_extra_ids - 1}>`.
    """

    def __init__(self, tokenizer_model: str, *, vocab_extra_ids: int = 0) -> None:
        if vocab_extra_ids < 0:
            raise TokenizerError(f"--vocab-extra-ids {vocab_extra_ids} is below 0; use 0 or more")
        super().__init__(tokenizer_model, vocab_extra_ids=vocab_extra_ids)
        self._model = _load_model(tokenizer_model)
        names = {"cls": "<CLS>", "sep": "<SEP>", "eod": "<EOD>", "mask": "<MASK>"}
        for role, number in (
            ("pad", self._model.pad_id()),
            ("bos", self._model.bos_id()),
            ("eos", self._model.eos_id()),
        ):
            names[role] = f"<{role.upper()}>" if number < 0 else self._model.id_to_piece(number)
        self._vocab = _pieces_of(self._model)
        extra = [f"<extra_id_{index}>" for index in range(vocab_extra_ids)]
        special_ids = {
            name: self._vocab.setdefault(name, len(self._vocab))
            for name in [*names.values(), *extra]
        }
        self._specials = SpecialTokens(special_ids)
        self._set_special_ids(**{role: special_ids[name] for role, name in names.items()})

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
                ids += self._model.encode(piece.text)
            else:
                ids.append(piece.special_id)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`; a special token stands between blanks, as the model strips its own."""
        parts: list[str] = []
        ordinary: list[int] = []
        for number in [*self._checked_ids(ids), None]:
            if number is not None and number not in self._specials.names:
                ordinary.append(number)
                continue
            if ordinary:
                parts.append(self._model.decode(ordinary))
                ordinary = []
            if number is not None:
                parts.append(self._specials.names[number])
        return " ".join(parts)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        own_ids: list[int] = []
        starts: list[int] = []
        for piece in self._specials.split(checked_text(text)):
            if piece.special_id is None:
                piece_ids, piece_starts = _encode_with_starts(self._model, piece.text)
                own_ids += piece_ids
                starts += [piece.start + start for start in piece_starts]
            else:
                own_ids.append(piece.special_id)
                starts.append(piece.start)
        if list(ids) != own_ids:
            raise not_of_this_text()
        return starts


def _load_model(path: str) -> sentencepiece.SentencePieceProcessor:
    existing_file("--tokenizer-model", path)
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(
            f"--tokenizer-model {path} is not a SentencePiece model ({error}); "
            "give the tokenizer.model file itself, or use --tokenizer-type HuggingFaceTokenizer"
        ) from error


def _pieces_of(model: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    return {model.id_to_piece(number): number for number in range(model.get_piece_size())}


def _id_or_none(number: int) -> int | None:
    return number if number >= 0 else None


def _encode_with_starts(
    model: sentencepiece.SentencePieceProcessor, text: str
) -> tuple[list[int], list[int]]:
    """Ids of `text` and where each starts, in characters of the text before normalisation."""
    mapping = model.encode_as_offset_mapping(text)
    return mapping["ids"], [start for start, _ in mapping["offsets"]]
