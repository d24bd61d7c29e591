"""Which samples each rank reads, in one run and in one that was stopped and resumed anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.core.datasets.utils import DatasetError
from megatron.training.datasets.data_samplers import (
    DataShare,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    build_pretraining_data_loader,
)


def _share(rank: int = 0, *, micro: int = 2, ranks: int = 3) -> DataShare:
    return DataShare(micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks)


def _single(total: int, consumed: int, **share: int) -> list[list[list[int]]]:
    """Micro-batches of every rank."""
    return [
        list(MegatronPretrainingSampler(total, consumed, _share(rank, **share)))
        for rank in range(share.get("ranks", 3))
    ]


def test_single_deals_chunks_to_ranks_in_order() -> None:
    assert _single(14, 0) == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert _single(14, 6) == [[[6, 7]], [[8, 9]], [[10, 11]]]
    assert _single(14, 12) == [[], [], []]  # 12 and 13 do not fill a chunk
    assert len(MegatronPretrainingSampler(14, 0, _share())) == 2


@pytest.mark.parametrize("steps", range(5))
def test_single_resumes_anywhere(steps: int) -> None:
    whole = _single(30, 0)
    assert _single(30, 6 * steps) == [batches[steps:] for batches in whole]


def _cyclic(consumed: int, count: int, *, sharding: bool, total: int = 20) -> list[list[list[int]]]:
    """The next `count` micro-batches of each of 3 ranks; an epoch has 3 steps of 2 x 3 samples."""
    return [
        list(
            itertools.islice(
                MegatronPretrainingRandomSampler(
                    total, consumed, _share(rank), data_sharding=sharding
                ),
                count,
            )
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_reads_each_sample_once_an_epoch(sharding: bool) -> None:
    ranks = _cyclic(0, 9, sharding=sharding)
    epochs = [
        [i for batches in ranks for batch in batches[start : start + 3] for i in batch]
        for start in (0, 3, 6)
    ]
    for seen in epochs:
        assert len(set(seen)) == 18 and set(seen) <= set(range(20))
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(len(batch) == 2 for batches in ranks for batch in batches)


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize("steps", range(8))
def test_cyclic_resumed_reads_what_an_unbroken_run_reads(sharding: bool, steps: int) -> None:
    """Steps 3 and 6 are epoch boundaries; what follows them must not begin late (U86)."""
    whole = _cyclic(0, 15, sharding=sharding)
    resumed = _cyclic(6 * steps, 15 - steps, sharding=sharding)
    assert resumed == [batches[steps:] for batches in whole]


def test_cyclic_with_sharding_keeps_ranks_apart() -> None:
    for rank, batches in enumerate(_cyclic(0, 9, sharding=True)):
        assert {i for batch in batches for i in batch} == set(range(6 * rank, 6 * rank + 6))


def test_cyclic_order_is_drawn_with_the_epoch_as_seed() -> None:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(20, generator=generator).tolist()
    second_epoch = [batches[:3] for batches in _cyclic(18, 3, sharding=False)]
    for rank, batches in enumerate(second_epoch):
        assert [i for batch in batches for i in batch] == order[rank::3][:6]


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize("consumed", [3, 9, 15, 21])
def test_cyclic_after_another_batch_size_fills_batches_across_the_boundary(
    sharding: bool, consumed: int
) -> None:
    """One sample per rank off the grid of two: a batch spans two epochs, no sample is lost."""
    whole = [[i for b in batches for i in b] for batches in _cyclic(0, 15, sharding=sharding)]
    for rank, batches in enumerate(_cyclic(consumed, 6, sharding=sharding)):
        assert [len(batch) for batch in batches] == [2] * 6
        assert [i for batch in batches for i in batch] == whole[rank][consumed // 3 :][:12]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _share(micro=0), "--micro-batch-size 0"),
        (lambda: _share(3), "rank 3 is not one of 3"),
        (
            lambda: MegatronPretrainingSampler(5, 0, _share()),
            "5 samples cannot fill one .* takes 6",
        ),
        (lambda: MegatronPretrainingSampler(6, 7, _share()), "7 samples are consumed of .* of 6"),
        (lambda: MegatronPretrainingRandomSampler(5, 0, _share()), "5 samples cannot fill one"),
        (lambda: MegatronPretrainingRandomSampler(6, -1, _share()), "-1 consumed samples"),
        (
            lambda: build_pretraining_data_loader([1] * 9, 0, _share(), dataloader_type="x"),
            "--dataloader-type 'x' is not one of single, cyclic, external",
        ),
    ],
)
def test_bad_requests(make: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        make()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders(num_workers: int) -> None:
    dataset = [{"tokens": torch.tensor([i, i])} for i in range(20)]
    single = build_pretraining_data_loader(dataset, 6, _share(1), num_workers=num_workers)
    assert [batch["tokens"][:, 0].tolist() for batch in single] == [[8, 9], [14, 15]]
    cyclic = build_pretraining_data_loader(
        dataset, 12, _share(1), dataloader_type="cyclic", num_workers=num_workers
    )
    read = [batch["tokens"][:, 0].tolist() for batch in itertools.islice(cyclic, 5)]
    assert read == _cyclic(12, 5, sharding=True)[1]


def test_what_is_no_dataset_passes_through() -> None:
    batches = iter([1, 2])
    assert build_pretraining_data_loader(None, 0, _share()) is None
    assert (
        build_pretraining_data_loader(batches, 0, _share(), dataloader_type="external") is batches
    )
