"""Data iterators of this rank: one per stage that reads data, starting where training left off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.datasets.utils import DatasetError
from megatron.training.config import RunConfig
from megatron.training.datasets.data_samplers import DataShare, build_pretraining_data_loader
from megatron.training.session import Session, TrainState

logger = logging.getLogger(__name__)

_SPLITS = ("train", "validation", "test")

DatasetProvider = Callable[[Sequence[int]], Sequence[Any]]
StageIterators = list["TimedIterator | None"]  # in chunk order; None for a stage without data


class TimedIterator:
    """An iterator that counts the seconds its consumer waited for it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._waited_s = 0.0

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        item = next(self._iterator)
        self._waited_s += time.perf_counter() - start
        return item

    def take_waited_s(self) -> float:
        """Seconds waited since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited


@dataclass
class RunData:
    """Train, validation and test iterators; None for a split without data anywhere."""

    train: StageIterators | None
    valid: StageIterators | None
    test: StageIterators | None


def train_valid_test_num_samples(run: RunConfig) -> tuple[int, int, int]:
    """How many samples each split must have at least (spec section 1.5)."""
    train_iters, batch = run.train_iters, run.global_batch_size
    train = run.training.train_samples or train_iters * batch
    interval, eval_iters = run.validation.eval_interval, run.validation.eval_iters
    evaluations = 1 + (train_iters // interval if interval else 0)
    evaluations += int(run.validation.eval_at_start)
    return train, evaluations * eval_iters * batch, eval_iters * batch


def build_run_data(session: Session, provider: DatasetProvider, state: TrainState) -> RunData:
    """Build the datasets and this rank's iterators over them. Collective."""
    sizes = train_valid_test_num_samples(session.run)
    logger.info("> building train, validation, and test datasets ...")
    logger.info(" > datasets target sizes (minimum size):")
    for label, size in zip(("train:", "validation:", "test:"), sizes, strict=True):
        logger.info("    %-11s %d", label, size)
    distributed = getattr(provider, "is_distributed", False)
    datasets: Sequence[Any] = (None, None, None)
    if distributed or session.reads_data:
        datasets = provider(sizes)
    _check_lengths(session.run, datasets, sizes)
    present = _agree_on_splits(session, datasets)
    starts = (state.consumed_train_samples, state.consumed_valid_samples, 0)
    return RunData(
        *(
            _stage_iterators(session, dataset, start) if here else None
            for dataset, start, here in zip(datasets, starts, present, strict=True)
        )
    )


def _check_lengths(run: RunConfig, datasets: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise DatasetError for data that would end before the run does.

    Datasets repeat to the length asked for, but a blend without weights is read once.
    """
    if run.dataloader_type != "single":
        return
    first = 1 if run.training.skip_train else 0
    for name, dataset, needed in list(zip(_SPLITS, datasets, sizes, strict=True))[first:]:
        if hasattr(dataset, "__len__") and len(dataset) < needed:
            raise DatasetError(
                f"the {name} data have {len(dataset)} samples of {run.model.seq_length} tokens, "
                f"but the run reads {needed}; give each dataset a weight, so that it repeats, or "
                "shorten the run"
            )


def _agree_on_splits(session: Session, datasets: Sequence[Any]) -> list[bool]:
    """Which splits have data on any rank, so that all ranks take the same decisions."""
    flags = torch.tensor([d is not None for d in datasets], dtype=torch.int)
    if session.groups.world is not None:
        flags = flags.to(session.device.torch_device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def _stage_iterators(session: Session, dataset: Any, consumed_samples: int) -> StageIterators:
    """An iterator of its own for each stage here that reads data: two under a V placement."""
    placement = session.pipeline.placement
    return [
        _iterator(session, dataset, consumed_samples)
        if stage in (0, placement.last_stage)
        else None
        for stage in placement.stages_by_rank[session.groups.position.pp]
    ]


def _iterator(session: Session, dataset: Any, consumed_samples: int) -> TimedIterator:
    run, position = session.run, session.groups.position
    loader = build_pretraining_data_loader(
        dataset,
        consumed_samples,
        DataShare(
            micro_batch_size=run.training.micro_batch_size,
            data_parallel_rank=position.dp,
            data_parallel_size=session.groups.sizes.dp,
        ),
        dataloader_type=run.dataloader_type,
        data_sharding=run.data.data_sharding,
        num_workers=run.data.num_workers,
        pin_memory=session.device.is_cuda,
    )
    return TimedIterator(iter(loader))
