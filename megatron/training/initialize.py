"""Start-up of one rank: command line, device, process groups, seeds, tokenizer -> `Session`."""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.device import Device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.tokenizers.padding import padded_vocab_size
from megatron.training.arguments import parse_run
from megatron.training.banner import argument_dump, size_line
from megatron.training.checkpoint_files import CheckpointFolder, read_common
from megatron.training.config import ConfigError, RunConfig
from megatron.training.global_vars import hold_session
from megatron.training.pipeline_setup import Pipeline
from megatron.training.session import Session
from megatron.training.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)


def initialize_megatron(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    *,
    argv: Sequence[str] | None = None,
) -> Session:
    """Make this rank ready to build a model.

    Bad arguments end the process with exit code 2 before any process group exists.
    """
    start = time.perf_counter()
    rank = int(os.environ.get("RANK", 0))
    setup_logging(rank)
    run, namespace = parse_run(
        argv,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        rank=rank,
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults or {},
        ignore_unknown_args=ignore_unknown_args,
        read_checkpoint_args=_read_checkpoint_args,
    )
    pipeline = _pipeline_or_exit(run, rank)
    setup_logging(rank, run.logging.logging_level)
    device = _choose_device(run)
    groups = _join(run, device)
    _log_start(run, namespace)
    _seed_everything(run.training.seed)
    if run.fusion.deterministic_mode:
        _make_deterministic(device)
    if run.fusion.manual_gc:
        gc.disable()
    tokenizer = build_tokenizer(namespace)
    session = Session(
        run=run,
        namespace=namespace,
        device=device,
        groups=groups,
        pipeline=pipeline,
        tokenizer=tokenizer,
        padded_vocab_size=_pad_vocabulary(run, tokenizer),
        microbatches=run.build_num_microbatches_calculator(),
        timers=Timers(run.logging.timing_log_level, run.logging.timing_log_option, device=device),
    )
    namespace.padded_vocab_size = session.padded_vocab_size
    hold_session(session)
    session.barrier()
    logger.info("time to initialize megatron (seconds): %.3f", time.perf_counter() - start)
    return session


def setup_logging(rank: int, level: int | None = None) -> None:
    """Messages go to stdout as plain lines; information from rank 0 only, warnings from all."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process
    root = logging.getLogger()
    if not any(isinstance(handler, _StdoutHandler) for handler in root.handlers):
        root.addHandler(_StdoutHandler())
    root.setLevel(level if level is not None else logging.INFO if rank == 0 else logging.WARNING)


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever stdout is at the time, and at once."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _pipeline_or_exit(run: RunConfig, rank: int) -> Pipeline:
    """The pipeline asked for; one that cannot be is an error of the command line."""
    try:
        return Pipeline.of(run)
    except ValueError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _choose_device(run: RunConfig) -> Device:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return Device.choose(run.parallel.device_type(torch.cuda.is_available()), local_rank)


def _join(run: RunConfig, device: Device) -> ProcessGroupCollection:
    """Join the other ranks, if there are any, and make all groups."""
    timeout = datetime.timedelta(minutes=run.parallel.distributed_timeout_minutes)
    if run.sizes.world_size > 1 and not dist.is_initialized():
        logger.info("> initializing torch distributed ...")
        dist.init_process_group(run.parallel.backend(device.is_cuda), timeout=timeout)
    groups = ProcessGroupCollection.build(run.sizes, timeout)
    parallel_state.hold(groups)
    logger.info("> initialized tensor model parallel with size %d", run.sizes.tp)
    logger.info("> initialized pipeline model parallel with size %d", run.sizes.pp)
    return groups


def _log_start(run: RunConfig, namespace: argparse.Namespace) -> None:
    sizes = run.sizes
    logger.info(
        size_line(
            world_size=sizes.world_size,
            data=sizes.dp,
            context=sizes.cp,
            tensor=sizes.tp,
            pipeline=sizes.pp,
        )
    )
    for notice in run.notices:
        logger.info("%s", notice)
    logger.info("%s", argument_dump(namespace))


def _seed_everything(seed: int) -> None:
    """Seeds what users' code may draw from; weights and dropout have keys of their own."""
    logger.info("> setting random seeds to %d ...", seed)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _make_deterministic(device: Device) -> None:
    if device.is_cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _pad_vocabulary(run: RunConfig, tokenizer: Any) -> int:
    """Rows of the embedding and the head."""
    settings = run.tokenizer
    if settings.padded_vocab_size is not None:
        return settings.padded_vocab_size
    size = settings.vocab_size or tokenizer.vocab_size
    if not settings.pad_vocab_size:
        return size
    padded = padded_vocab_size(
        size,
        divisible_by=settings.make_vocab_size_divisible_by,
        tensor_parallel_size=run.sizes.tp,
    )
    logger.info(
        " > padded vocab (size: %d) with %d dummy tokens (new size: %d)",
        size,
        padded - size,
        padded,
    )
    return padded


def _read_checkpoint_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """The arguments stored in the checkpoint that `--load` names, for `--use-checkpoint-args`."""
    folder = CheckpointFolder(namespace.load or namespace.pretrained_checkpoint)
    iteration = folder.newest() if namespace.ckpt_step is None else namespace.ckpt_step
    if iteration is None:
        raise ConfigError([f"--use-checkpoint-args: {folder.root} holds no checkpoint"])
    return read_common(folder.existing_path(iteration))["args"]
