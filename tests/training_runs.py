"""Small training runs inside pool workers, and what they leave: losses, norms, weights by name."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.data import build_run_data
from megatron.training.initialize import initialize_megatron
from megatron.training.model_setup import ModelProvider, Trainer, build_trainer
from megatron.training.session import TrainState
from megatron.training.training import train_step


def tiny_data() -> str:
    """Prefix of a small dataset of 300 documents, made once for this test run and its workers."""
    folder = os.environ.get("MEGATRON_TINY_DATA")
    if folder is None:
        folder = os.environ["MEGATRON_TINY_DATA"] = tempfile.mkdtemp(prefix="tiny-data-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=numpy.uint16)
        generator = numpy.random.default_rng(0)
        for length in generator.integers(5, 60, size=300):
            builder.add_item(torch.from_numpy(generator.integers(0, 119, size=length)))
            builder.end_document()
        builder.finalize(f"{folder}/text.idx")
    return f"{folder}/text"


_COMMON = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --train-iters 5 --lr 1e-2 --lr-warmup-iters 2
    --clip-grad 0.5 --data-path {tiny_data()} --split 80,10,10
    --tokenizer-type NullTokenizer --vocab-size 120
    --num-workers 0 --init-method-std 0.05 --log-interval 1000 --eval-iters 1 --seed 7
"""
LLAMA = (
    _COMMON
    + """
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --group-query-attention --num-query-groups 2 --ffn-hidden-size 48
"""
)
GPT = _COMMON + "--ffn-hidden-size 64"


class Outcome(NamedTuple):
    """Of one rank: per step losses (where the loss is) and norms; hashes of weights by name."""

    losses: list[str]
    norms: list[str]
    initial: dict[str, str]
    final: dict[str, str]


def train_cases(cases: Sequence[str]) -> list[Outcome]:
    """Each case is a command line; the world is the pool's."""
    return [train_case(case) for case in cases]


def train_case(case: str, *, steps: int = 5) -> Outcome:
    trainer, state, iterators = start(case)
    initial = dict(hashes(trainer))
    losses, norms = [], []
    for _ in range(steps):
        report = train_step(trainer, pretrain_gpt.forward_step, iterators, state)
        losses += [value.hex() for value in report.losses.values()]
        norms.append(float(report.grad_norm or "nan").hex())
    return Outcome(losses, norms, initial, dict(hashes(trainer)))


def start(
    case: str, *, model_provider: ModelProvider = pretrain_gpt.model_provider
) -> tuple[Trainer, TrainState, Any]:
    """Build all that `pretrain` would for this command line, up to the training loop."""
    use_world_of_pool()
    session = initialize_megatron(argv=case.split())
    trainer = build_trainer(session, model_provider)
    state = TrainState()
    data = build_run_data(session, pretrain_gpt.train_valid_test_datasets_provider, state)
    return trainer, state, data.train


def use_world_of_pool() -> None:
    """Tell the command line the world size and rank, as torchrun would."""
    initialised = dist.is_initialized()
    os.environ["RANK"] = str(dist.get_rank() if initialised else 0)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size() if initialised else 1)


def hashes(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """(global name, hash of the values) of this rank's parameters."""
    for chunk in trainer.model:
        module: Any = chunk.module
        for local_name, parameter in module.named_parameters():
            values = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
            yield module.global_parameter_name(local_name), hashlib.sha256(values).hexdigest()


def merged(outcomes: Sequence[Outcome], field: str) -> dict[str, str]:
    """Hashes of all ranks; copies of one name must agree."""
    together: dict[str, str] = {}
    for outcome in outcomes:
        for name, digest in getattr(outcome, field).items():
            assert together.setdefault(name, digest) == digest, f"copies of {name} differ"
    return together
