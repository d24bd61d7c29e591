"""Which samples each data-parallel rank reads, micro-batch by micro-batch, from any position on.

A sampler yields the sample numbers of one micro-batch of its rank at a time. It starts behind
`consumed_samples`, the samples that all ranks together have read, so a resumed run goes on exactly
where the saved one stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.datasets.utils import DatasetError


@dataclass(frozen=True, kw_only=True)
class DataShare:
    """This rank's part of every batch."""

    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise DatasetError(f"--micro-batch-size {self.micro_batch_size} must be at least 1")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise DatasetError(
                f"data-parallel rank {self.data_parallel_rank} is not one of "
                f"{self.data_parallel_size}"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks read for one micro-batch each."""
        return self.micro_batch_size * self.data_parallel_size


class MegatronPretrainingSampler:
    """Every sample once, in order; the incomplete rest at the end is dropped.

    Samples are dealt out in chunks of micro-batch size x data-parallel size; rank r takes the
    r-th micro-batch of each chunk.
    """

    def __init__(self, total_samples: int, consumed_samples: int, share: DataShare) -> None:
        if not 0 <= consumed_samples <= total_samples:
            raise DatasetError(
                f"{consumed_samples} samples are consumed of a dataset of {total_samples}; ask "
                "for a larger dataset (--train-iters or --train-samples) or more of --split"
            )
        if total_samples < share.samples_per_step:
            raise _too_few(total_samples, share)
        self._first, self._total, self._share = consumed_samples, total_samples, share

    def __len__(self) -> int:
        """Micro-batches that each rank still reads."""
        return (self._total - self._first) // self._share.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        share = self._share
        mine = self._first + share.data_parallel_rank * share.micro_batch_size
        for step in range(len(self)):
            begin = mine + step * share.samples_per_step
            yield list(range(begin, begin + share.micro_batch_size))


class MegatronPretrainingRandomSampler:
    """All samples in a new random order in each epoch, without end.

    The order of an epoch is drawn with the epoch's number as seed. With `data_sharding` a rank
    owns a fixed run of the samples and shuffles that; without, all ranks draw one order and take
    its entries in turn. Samples that do not fill a micro-batch on every rank are left out.

    The iterator itself goes from epoch to epoch, so the position within an epoch is applied to
    the one in which a run resumes and to none behind it.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        share: DataShare,
        *,
        data_sharding: bool = True,
    ) -> None:
        if total_samples < share.samples_per_step:
            raise _too_few(total_samples, share)
        if consumed_samples < 0:
            raise DatasetError(f"{consumed_samples} consumed samples cannot be below 0")
        self._share, self._data_sharding = share, data_sharding
        self._steps_per_epoch = total_samples // share.samples_per_step
        self._num_in_order = total_samples // share.micro_batch_size * share.micro_batch_size
        self._consumed = consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        samples = self._samples()
        while True:
            yield list(itertools.islice(samples, self._share.micro_batch_size))

    def _samples(self) -> Iterator[int]:
        """All that this rank reads."""
        samples_per_epoch = self._steps_per_epoch * self._share.samples_per_step
        epoch, consumed_in_epoch = divmod(self._consumed, samples_per_epoch)
        first = consumed_in_epoch // self._share.data_parallel_size
        while True:
            yield from self._order_of(epoch)[first:]
            epoch, first = epoch + 1, 0

    def _order_of(self, epoch: int) -> list[int]:
        """What this rank reads in an epoch."""
        share = self._share
        num_samples = self._steps_per_epoch * share.micro_batch_size
        generator = torch.Generator().manual_seed(epoch)
        if self._data_sharding:
            order = torch.randperm(num_samples, generator=generator)
            return (share.data_parallel_rank * num_samples + order).tolist()
        order = torch.randperm(self._num_in_order, generator=generator)
        return order[share.data_parallel_rank :: share.data_parallel_size][:num_samples].tolist()


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    share: DataShare,
    *,
    dataloader_type: Literal["single", "cyclic", "external"] = "single",
    data_sharding: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Any:
    """A loader of this rank's micro-batches, starting behind `consumed_samples`; None for None.

    `external` data already are what an iterator of micro-batches is asked for and come back as
    they are.
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    sampler: MegatronPretrainingSampler | MegatronPretrainingRandomSampler
    if dataloader_type == "single":
        sampler = MegatronPretrainingSampler(len(dataset), consumed_samples, share)
    elif dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(
            len(dataset), consumed_samples, share, data_sharding=data_sharding
        )
    else:
        raise DatasetError(
            f"--dataloader-type {dataloader_type!r} is not one of single, cyclic, external"
        )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )


def _too_few(total_samples: int, share: DataShare) -> DatasetError:
    return DatasetError(
        f"a dataset of {total_samples} samples cannot fill one micro-batch of "
        f"{share.micro_batch_size} on {share.data_parallel_size} data-parallel ranks, which takes "
        f"{share.samples_per_step}; use more data or a smaller --micro-batch-size"
    )
