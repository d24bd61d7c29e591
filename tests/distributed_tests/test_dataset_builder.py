"""Datasets on several ranks: rank 0 builds, the others load, and a failure anywhere ends all."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.worker_pool import WorkerPool

_TOKENIZER = SimpleNamespace(vocab_size=100, eod=99, unique_identifiers={"class": "Fake"})


def _write(prefix: pathlib.Path) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for number in range(10):
        builder.add_document([number] * 5, [5])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def _build(prefix: str, built_on: tuple[int, ...], broken_rank: int | None) -> Any:
    """Tokens of the first training sample, or the error's text, and who built an index."""
    rank = dist.get_rank()
    built_here = []

    class Dataset(GPTDataset):
        def _build_index(self) -> Any:
            built_here.append(self.index_split.name)
            if rank == broken_rank:
                raise OSError("no space left")
            return super()._build_index()

        def __init__(self, *args: Any) -> None:
            if rank == broken_rank != 0:
                raise OSError("no space left")
            super().__init__(*args)

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=4,
        blend=([prefix], None),
        split="8,1,1",
        tokenizer=_TOKENIZER,
    )
    builder = BlendedMegatronDatasetBuilder(Dataset, (9, 2, 2), lambda: rank in built_on, config)
    try:
        train, _, test = builder.build()
    except (ValueError, OSError) as error:
        return str(error), built_here
    first = None if train is None else train[0]["tokens"].tolist()
    assert (train is None) == (test is None)
    return first, built_here


def test_rank_0_builds_and_the_others_load(pool: WorkerPool, tmp_path: pathlib.Path) -> None:
    results = pool.run(3, _build, _write(tmp_path / "data"), (1, 2), None)
    assert [built for _, built in results] == [["train", "valid", "test"], [], []]
    samples = [sample for sample, _ in results]
    assert samples[0] is None  # built the index, but does not read
    assert samples[1] == samples[2] and samples[1] is not None


@pytest.mark.parametrize("broken_rank", [0, 2])
def test_a_failing_rank_ends_all(
    pool: WorkerPool, tmp_path: pathlib.Path, broken_rank: int
) -> None:
    results = pool.run(3, _build, _write(tmp_path / "data"), (0, 1, 2), broken_rank)
    for rank, (text, _) in enumerate(results):
        if rank == broken_rank:
            assert text == "no space left"
        else:
            assert text == f"rank {broken_rank} could not build the datasets: no space left"
