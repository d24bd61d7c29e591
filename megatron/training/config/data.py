"""Training data, tokenizer, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class DataArguments(ArgumentGroup):
    """Data."""

    data_path: tuple[str, ...] | None = arg(
        None,
        "Dataset prefixes (without .bin and .idx): one, several, or weight prefix weight prefix.",
        nargs="*",
    )
    train_data_path: tuple[str, ...] | None = arg(
        None, "Like --data-path, for training alone.", nargs="*"
    )
    valid_data_path: tuple[str, ...] | None = arg(
        None, "Like --data-path, for validation alone.", nargs="*"
    )
    test_data_path: tuple[str, ...] | None = arg(
        None, "Like --data-path, for the test set alone.", nargs="*"
    )
    data_args_path: str | None = arg(None, "File that holds what would follow --data-path.")
    per_split_data_args_path: str | None = arg(
        None, "JSON file with lists under train, valid and test."
    )
    mock_data: bool = arg(False, "Synthetic samples; needs no files.")
    split: str | None = arg(
        None, "Shares of training, validation and test data, e.g. 949,50,1. Without it: 969,30,1."
    )
    data_cache_path: str | None = arg(
        None, "Directory of index caches. Without it: beside each dataset."
    )
    mmap_bin_files: bool = arg(True, "Read .bin files by seeking instead of mapping them.")
    reset_position_ids: bool = arg(False, "Count positions anew after each end of document.")
    reset_attention_mask: bool = arg(False, "Hide earlier documents of the same sequence.")
    eod_mask_loss: bool = arg(False, "Leave end-of-document tokens out of the loss.")
    num_workers: int = arg(2, "Data loader processes per rank.", at_least=0)
    num_dataset_builder_threads: int = arg(1, "Threads that build index caches.", at_least=1)
    dataloader_type: Literal["single", "cyclic", "external"] | None = arg(
        None,
        "Order of samples: as indexed (single), shuffled each epoch (cyclic), or the program's own "
        "iterator (external). Without it: single.",
    )
    data_sharding: bool = arg(
        True, "Cyclic order: shuffle all samples together instead of a part per rank."
    )
    mid_level_dataset_surplus: float = arg(
        0.005, "Extra share of samples built for each part of a blend.", at_least=0
    )

    def problems(self) -> Iterator[str]:
        """At most one source, and a split only where one list is to be cut."""
        per_split = {
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
        }
        named = [flag for flag, value in per_split.items() if value is not None]
        sources = [*named[:1]]
        sources += ["--data-path"] * (self.data_path is not None)
        sources += ["--data-args-path"] * (self.data_args_path is not None)
        sources += ["--per-split-data-args-path"] * (self.per_split_data_args_path is not None)
        sources += ["--mock-data"] * self.mock_data
        if len(sources) > 1:
            yield f"{' and '.join(sources)} are different sources of data; give one"
        if self.split is not None and (named or self.per_split_data_args_path is not None):
            source = named[0] if named else "--per-split-data-args-path"
            yield f"--split {self.split} has nothing to cut with {source}; drop one"


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments(ArgumentGroup):
    """Tokenizer and vocabulary."""

    tokenizer_type: str | None = arg(
        None,
        "GPT2BPETokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer, "
        "HuggingFaceTokenizer, TikTokenizer, NullTokenizer.",
    )
    tokenizer_model: str | None = arg(None, "Model file of the tokenizer, or its hub name.")
    vocab_file: str | None = arg(None, "GPT-2 vocabulary (JSON).")
    merge_file: str | None = arg(None, "GPT-2 merges.")
    vocab_size: int | None = arg(
        None,
        "Size of the vocabulary, for NullTokenizer or to override the tokenizer's.",
        at_least=1,
    )
    padded_vocab_size: int | None = arg(
        None, "Rows of the embedding, as they are; no padding is computed.", at_least=1
    )
    make_vocab_size_divisible_by: int = arg(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", at_least=1
    )
    vocab_extra_ids: int = arg(0, "Extra ids of SentencePieceTokenizer.", at_least=0)
    tiktoken_pattern: Literal["v1", "v2"] | None = arg(None, "Split pattern of TikTokenizer.")
    tiktoken_num_special_tokens: int = arg(
        1000, "Ids at the start of TikTokenizer's vocabulary kept for special tokens.", at_least=0
    )
    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None,
        "Special tokens of the tokenizer.",
        flags=("--tiktoken-special-tokens", "--tokenizer-special-tokens"),
    )
    tokenizer_hf_no_use_fast: bool = arg(False, "HuggingFaceTokenizer: the slow implementation.")
    tokenizer_hf_no_include_special_tokens: bool = arg(
        False, "HuggingFaceTokenizer: add no begin and end tokens."
    )
    trust_remote_code: bool = arg(False, "HuggingFaceTokenizer: run code that comes with it.")
    null_tokenizer_eod_id: int | None = arg(
        None, "NullTokenizer's end-of-document id. Without it: vocabulary size - 1."
    )
    null_tokenizer_pad_id: int = arg(-1, "NullTokenizer's padding id; -1 is none.")
    pad_vocab_size: bool = arg(True, "Do not pad the vocabulary.")
    allow_ambiguous_pad_tokens: bool = arg(
        False, "Let the padding id also be another special token."
    )


@dataclass(frozen=True, kw_only=True)
class ValidationArguments(ArgumentGroup):
    """Validation."""

    eval_iters: int = arg(100, "Global batches of one evaluation.", at_least=0)
    eval_interval: int | None = arg(
        None, "Iterations between evaluations. Without it: only after training.", at_least=1
    )
    eval_at_start: bool = arg(False, "Evaluate once before the first iteration.")
