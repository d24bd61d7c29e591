"""Text and tokenizer for the quick start, made from what every Python installation has.

python examples/quickstart_data.py corpus corpus.jsonl
python examples/quickstart_data.py tokenizer corpus.jsonl tokenizer 4096
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator

_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def standard_library_files() -> Iterator[pathlib.Path]:
    """Python's own source files in a fixed order, tests left out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(path.relative_to(root).parts):
            yield path


def write_corpus(target: pathlib.Path) -> None:
    """One JSON object with the key `text` a line; moved to its name when complete."""
    temporary = target.with_suffix(".writing")
    count = 0
    with temporary.open("w") as lines:
        for path in standard_library_files():
            text = path.read_text(errors="ignore")
            if text.strip():
                lines.write(json.dumps({"text": text}) + "\n")
                count += 1
    os.replace(temporary, target)
    print(f"{count} documents")


def train_tokenizer(corpus: pathlib.Path, prefix: pathlib.Path, vocab_size: int) -> None:
    """A SentencePiece BPE model `<prefix>.model` of `vocab_size` pieces; bytes as a last resort."""
    import sentencepiece

    def sentences() -> Iterator[str]:
        with corpus.open() as lines:
            for line in lines:
                yield from filter(None, json.loads(line)["text"].split("\n"))

    temporary = prefix.with_name(f"{prefix.name}.writing")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_prefix=str(temporary),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        input_sentence_size=300_000,
        shuffle_input_sentence=False,
        minloglevel=2,
    )
    for suffix in (".vocab", ".model"):
        os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="write the corpus as JSON lines")
    corpus.add_argument("target", type=pathlib.Path)
    tokenizer = commands.add_parser("tokenizer", help="train a SentencePiece model")
    tokenizer.add_argument("corpus", type=pathlib.Path)
    tokenizer.add_argument("prefix", type=pathlib.Path)
    tokenizer.add_argument("vocab_size", type=int)
    args = parser.parse_args()
    if args.command == "corpus":
        write_corpus(args.target)
    else:
        train_tokenizer(args.corpus, args.prefix, args.vocab_size)


if __name__ == "__main__":
    main()
