"""Choosing and building a tokenizer by type; the import locations; vocabulary padding."""

from __future__ import annotations

import argparse
import logging

import pytest

from megatron.core import tokenizers
from megatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from megatron.core.tokenizers import TOKENIZER_TYPES, TokenizerError, build_tokenizer
from megatron.core.tokenizers.padding import padded_vocab_size
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_from_args_core
from megatron.training.tokenizer import build_tokenizer as build_from_args


def test_types_are_those_of_megatron() -> None:
    assert set(TOKENIZER_TYPES) == {
        "GPT2BPETokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
        "TikTokenizer",
        "NullTokenizer",
    }


def test_import_locations_name_the_same_things() -> None:
    assert MegatronTokenizer is tokenizers.MegatronTokenizer
    assert build_from_args is build_from_args_core
    assert isinstance(build_tokenizer("NullTokenizer", vocab_size=9), MegatronTokenizer)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("GPT2BPETokenizer", "--vocab-file"),
        ("GPTSentencePieceTokenizer", "--tokenizer-model"),
        ("Llama2Tokenizer", "--tokenizer-model"),
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("HuggingFaceTokenizer", "--tokenizer-model"),
        ("TikTokenizer", "--tokenizer-model"),
        ("NullTokenizer", "--vocab-size"),
    ],
)
def test_a_missing_input_is_named(name: str, flag: str) -> None:
    with pytest.raises(TokenizerError, match=f"--tokenizer-type {name} needs {flag}, which"):
        build_tokenizer(name, tokenizer_model="")


def test_merges_are_needed_beside_the_vocabulary(gpt2_files: tuple[str, str]) -> None:
    with pytest.raises(TokenizerError, match="GPT2BPETokenizer needs --merge-file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0])


def test_a_missing_file_is_named(gpt2_files: tuple[str, str]) -> None:
    with pytest.raises(TokenizerError, match=r"--merge-file nowhere\.txt is not a file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file="nowhere.txt")


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match="NulTokenizer is not known") as caught:
        build_tokenizer("NulTokenizer")
    assert all(name in str(caught.value) for name in TOKENIZER_TYPES)


@pytest.mark.parametrize("name", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_bert_types_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(TokenizerError, match=f"{name} is not supported: it serves BERT"):
        build_tokenizer(name, vocab_file="vocab.txt")


def test_an_option_of_another_type_is_refused() -> None:
    with pytest.raises(TokenizerError, match="NullTokenizer has no option --tiktoken-pattern"):
        build_tokenizer("NullTokenizer", vocab_size=8, tiktoken_pattern="v1")


def test_an_unread_input_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    build_tokenizer("NullTokenizer", vocab_size=8, merge_file="merges.txt")
    assert "--merge-file is not read by --tokenizer-type NullTokenizer" in caplog.messages


def test_a_vocabulary_size_below_the_tokenizers_is_a_clash(plain_model: str) -> None:
    with pytest.raises(TokenizerError, match="--vocab-size 119 is less than the 120 ids"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=plain_model, vocab_size=119)
    same = build_tokenizer("Llama2Tokenizer", tokenizer_model=plain_model, vocab_size=120)
    assert same.vocab_size == 120


def test_arguments_are_read_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    args = argparse.Namespace(
        tokenizer_type="NullTokenizer",
        vocab_size=50,
        null_tokenizer_eod_id=3,
        null_tokenizer_pad_id=None,
        tiktoken_pattern="v1",  # of another type: has a value on every command line
    )
    before = dict(vars(args))
    with caplog.at_level(logging.WARNING):
        tokenizer = build_from_args(args)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (50, 3, -1)
    assert vars(args) == before
    assert not caplog.messages


def test_arguments_name_files(plain_model: str, caplog: pytest.LogCaptureFixture) -> None:
    args = argparse.Namespace(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=plain_model,
        vocab_file="vocab.json",
        vocab_extra_ids=5,
    )
    tokenizer = build_from_args(args)
    assert "<extra_id_4>" in tokenizer.vocab
    assert "--vocab-file is not read by --tokenizer-type SentencePieceTokenizer" in caplog.messages


def test_arguments_without_a_type_say_so() -> None:
    with pytest.raises(TokenizerError, match="--tokenizer-type is not given; choose from GPT2BPE"):
        build_from_args(argparse.Namespace())
    with pytest.raises(TokenizerError, match="--tokenizer-type nope is not known"):
        build_from_args(argparse.Namespace(tokenizer_type="nope"))


@pytest.mark.parametrize(
    ("vocab_size", "padded"),
    [(32000, (32000, 32000, 32256, 32768)), (50257, (50304, 50432, 50688, 51200))],
)
def test_padded_sizes(vocab_size: int, padded: tuple[int, ...]) -> None:
    """Sizes that checkpoints of Megatron-LM have, at tensor parallel sizes 1, 2, 4, 8."""
    sizes = tuple(
        padded_vocab_size(vocab_size, divisible_by=128, tensor_parallel_size=tp)
        for tp in (1, 2, 4, 8)
    )
    assert sizes == padded


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ((100, 0, 1), "--make-vocab-size-divisible-by 0"),
        ((100, 128, 0), "--tensor-model-parallel-size 0"),
        ((0, 128, 1), "vocabulary size 0"),
    ],
)
def test_padding_refuses_sizes_below_one(arguments: tuple[int, int, int], flag: str) -> None:
    vocab_size, divisible_by, tensor_parallel_size = arguments
    with pytest.raises(TokenizerError, match=f"{flag} is below 1"):
        padded_vocab_size(
            vocab_size, divisible_by=divisible_by, tensor_parallel_size=tensor_parallel_size
        )
