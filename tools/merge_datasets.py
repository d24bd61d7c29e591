"""Merge all datasets of a directory into one, in the order of their names.

    python tools/merge_datasets.py --input pieces --output-prefix corpus_text_document

reads pieces/*.bin and .idx and writes corpus_text_document.bin and .idx, which appear when all is
done or not at all. All pieces must hold tokens of the same type.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import DatasetError
from megatron.training.datasets.dataset_files import merge, publish, staging_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 for an error (shown on stderr)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="directory that holds the datasets")
    parser.add_argument("--output-prefix", required=True, help="path of the result, no suffix")
    parser.add_argument("--multimodal", action="store_true", help="the datasets have modalities")
    args = parser.parse_args(argv)
    try:
        prefixes = find_datasets(args.input)
        merge_datasets(prefixes, args.output_prefix, multimodal=args.multimodal)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = IndexedDataset(args.output_prefix)
    print(
        f"merged {len(prefixes)} datasets into {args.output_prefix}: "
        f"{len(result.document_indices) - 1} documents, {len(result)} sequences, "
        f"{result.sequence_lengths.sum(dtype='int64')} tokens"
    )
    return 0


def find_datasets(directory: str) -> list[str]:
    """Prefixes of all datasets in a directory, by name. Raises DatasetError for half a pair."""
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        raise DatasetError(f"--input {directory} is not a directory")
    names = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    prefixes = sorted({name[:-4] for name in names})
    if not prefixes:
        raise DatasetError(f"--input {directory} holds no .bin and .idx files")
    for prefix in prefixes:
        for name, other in ((f"{prefix}.bin", ".idx"), (f"{prefix}.idx", ".bin")):
            if name not in names:
                raise DatasetError(f"{folder / prefix}{other} has no {name} beside it")
    return [str(folder / prefix) for prefix in prefixes]


def merge_datasets(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool) -> None:
    """Write the datasets one behind the other as `output_prefix`."""
    output = pathlib.Path(output_prefix).resolve()
    if output in {pathlib.Path(prefix).resolve() for prefix in prefixes}:
        raise DatasetError(
            f"--output-prefix {output_prefix} is one of the datasets to merge; write the result "
            "elsewhere, or remove what an earlier run left"
        )
    datasets = [IndexedDataset(prefix, multimodal=multimodal) for prefix in prefixes]
    with staging_folder(output_prefix) as folder:
        staged = str(folder / "merged")
        merge(prefixes, staged, datasets[0].dtype, multimodal=multimodal)
        publish(staged, output_prefix)


if __name__ == "__main__":
    sys.exit(main())
