"""Small tokenizer files, made on the fly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

LINES = [
    "the quick brown fox jumps over the lazy dog. hello world, how are you?",
    "naïve café 你好 мир 12345",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
]


def train_sentencepiece(path: Path, **options: Any) -> str:
    """Write a tiny SentencePiece model; `options` override the trainer's."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            **{
                "sentence_iterator": iter(LINES * 20),
                "model_writer": file,
                "model_type": "bpe",
                "vocab_size": 120,
                "hard_vocab_limit": False,
                "minloglevel": 2,
                **options,
            }
        )
    return str(path)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.fixture(scope="session")
def plain_model(model_folder: Path) -> str:
    """Trained with SentencePiece's defaults: unk 0, bos 1, eos 2, no pad, blanks normalised."""
    return train_sentencepiece(model_folder / "plain.model")


@pytest.fixture(scope="session")
def llama_model(model_folder: Path) -> str:
    """Like Llama's: every blank is kept, what is unknown falls back to bytes."""
    return train_sentencepiece(
        model_folder / "llama.model",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


@pytest.fixture(scope="session")
def bare_model(model_folder: Path) -> str:
    """A model with neither bos nor eos."""
    return train_sentencepiece(model_folder / "bare.model", bos_id=-1, eos_id=-1)


@pytest.fixture(scope="session")
def marked_model(model_folder: Path) -> str:
    """A model that has some of T5's special tokens, and pad, itself."""
    symbols = ["<EOD>", "<extra_id_0>"]
    return train_sentencepiece(
        model_folder / "marked.model", user_defined_symbols=symbols, pad_id=3
    )


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A vocabulary and merges in GPT-2's file format: bytes, some merges, the end token."""
    folder = tmp_path_factory.mktemp("gpt2")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable}
    symbol |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    lines = ["Ġ t", "h e", "Ġt he", "i n", "r e", "Ġ Ġ", "l l", "he ll", "hell o", "1 2", "' t"]
    for word in ("é", "你好", "мир", "\n\n", "😀"):  # merges inside and across characters
        symbols = [symbol[byte] for byte in word.encode()]
        whole = list(itertools.accumulate(symbols))
        lines += [f"{left} {right}" for left, right in zip(whole, symbols[1:], strict=False)]
    lines = list(dict.fromkeys(lines))
    tokens = [*symbol.values(), *(line.replace(" ", "") for line in lines), "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    text = "\n".join(["#version: 0.2", *lines, ""])
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    return str(folder / "vocab.json"), str(folder / "merges.txt")
