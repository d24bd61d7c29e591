"""Whole runs of `pretrain` inside pool workers, watched from outside: steps, weights, data, output.

histories = pool.run(2, pretrain_cases, [case])   # one list of histories per rank
together = joined([rank[0] for rank in histories])
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy
import torch

import pretrain_gpt
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.optimizer.entries import OptimizerEntry
from megatron.training import evaluation, reporting, training
from megatron.training.model_setup import Trainer
from megatron.training.step_report import StepReport
from tests.training_runs import hashes, use_world_of_pool

Array = numpy.ndarray
Hook = Callable[[Trainer, int], None]  # (trainer, iteration): called before and after each step


@dataclasses.dataclass
class History:
    """What one rank (or, joined, all ranks) saw of a run."""

    steps: list[StepReport]
    weights: list[dict[str, str]]  # hashes by global name, before the first step and after each
    moments: dict[str, Array]  # optimizer tensors at the end, whole and flat in fp32, by key
    scaler: dict[str, Any]
    samples: dict[str, list[int]]  # sample numbers read, by split
    output: str
    evaluations: list[dict[str, str]] = dataclasses.field(default_factory=list)  # losses, exactly
    exit_code: int | None = None
    _slices: dict[str, dict[int, Array]] = dataclasses.field(default_factory=dict)

    @property
    def losses(self) -> list[str]:
        """Of every step, exactly (hexadecimal)."""
        return [loss.hex() for step in self.steps for loss in step.losses.values()]

    @property
    def norms(self) -> list[str]:
        return ["none" if s.grad_norm is None else s.grad_norm.hex() for s in self.steps]

    @property
    def iterations(self) -> list[int]:
        return [step.iteration for step in self.steps]


def pretrain_cases(cases: Sequence[str], **options: Any) -> list[History]:
    """Each case is a command line of its own; options are those of `pretrain_case`."""
    return [pretrain_case(case, **options) for case in cases]


def pretrain_case(
    case: str,
    *,
    model_provider: Callable[..., torch.nn.Module] = pretrain_gpt.model_provider,
    forward_step: Any = pretrain_gpt.forward_step,
    before_step: Hook | None = None,
    after_step: Hook | None = None,
) -> History:
    """One run of `pretrain` with this command line, in the world of the pool."""
    use_world_of_pool()
    history = History([], [], {}, {}, {"train": [], "valid": [], "test": []}, "")
    built: list[Trainer] = []
    original_step = training.train_step

    def step(trainer: Trainer, *arguments: Any, **options: Any) -> StepReport:
        state = arguments[2]
        if not history.weights:
            history.weights.append(dict(hashes(trainer)))
        if before_step is not None:
            before_step(trainer, state.iteration + 1)
        return original_step(trainer, *arguments, **options)

    original_record = reporting.Reporting.record_step

    def record(self: reporting.Reporting, report: StepReport, *arguments: Any) -> None:
        """When a step is settled: with post-validation, early in the next iteration."""
        original_record(self, report, *arguments)
        history.steps.append(report)
        history.weights.append(dict(hashes(built[0])))
        if after_step is not None:
            after_step(built[0], report.iteration)

    original_evaluate = evaluation.evaluate

    def evaluate(*arguments: Any, **options: Any) -> dict[str, float]:
        losses = original_evaluate(*arguments, **options)
        history.evaluations.append({name: loss.hex() for name, loss in losses.items()})
        return losses

    original_build = training.build_trainer

    def build(*arguments: Any) -> Trainer:
        built.append(original_build(*arguments))
        return built[0]

    output = io.StringIO()
    with (
        mock.patch.object(training, "train_step", step),
        mock.patch.object(reporting.Reporting, "record_step", record),
        mock.patch.object(training, "build_trainer", build),
        mock.patch.object(evaluation, "evaluate", evaluate),
        _recorded_samples(history.samples),
        contextlib.redirect_stdout(output),
    ):
        try:
            training.pretrain(
                pretrain_gpt.train_valid_test_datasets_provider,
                model_provider,
                ModelType.encoder_or_decoder,
                forward_step,
                argv=case.split(),
            )
        except SystemExit as end:
            history.exit_code = int(end.code or 0)
    history.output = output.getvalue()
    if built:
        _record_end(history, built[0])
    return history


def joined(ranks: Sequence[History]) -> History:
    """The run as a whole: losses from where they are; copies of one tensor must agree."""
    with_loss = next(
        (r for r in ranks if any(s.losses for s in r.steps) or any(r.evaluations)), ranks[0]
    )
    output = "".join(rank.output for rank in ranks)
    whole = dataclasses.replace(with_loss, weights=[], moments={}, output=output, _slices={})
    for rank in ranks:
        assert rank.norms == whole.norms, "ranks know different gradient norms"
        assert [s.skipped for s in rank.steps] == [s.skipped for s in whole.steps]
        assert rank.scaler == whole.scaler, "ranks have different loss scales"
        for name, values in rank.moments.items():
            known = whole.moments.setdefault(name, values)
            assert numpy.array_equal(known, values), f"copies of {name} differ"
        for name, pieces in rank._slices.items():
            whole._slices.setdefault(name, {}).update(pieces)
    for after_step in zip(*(rank.weights for rank in ranks), strict=True):
        together: dict[str, str] = {}
        for weights in after_step:
            for name, digest in weights.items():
                assert together.setdefault(name, digest) == digest, f"copies of {name} differ"
        whole.weights.append(together)
    for name, pieces in whole._slices.items():
        whole.moments[name] = numpy.concatenate([pieces[index] for index in sorted(pieces)])
    return whole


def run(pool: Any, world_size: int, *cases: str, **options: Any) -> list[History]:
    """The cases one after the other on `world_size` ranks, each joined over the ranks."""
    body = functools.partial(pretrain_cases, **options)
    per_rank = pool.run(world_size, body, cases, timeout_s=100)
    for history in itertools.chain.from_iterable(per_rank):
        assert history.exit_code is None, history.output[-2000:]
    return [joined([rank[index] for rank in per_rank]) for index in range(len(cases))]


def assert_same_training(ours: History, reference: History, label: str = "") -> None:
    """Bit for bit: losses, norms, learning rates, weights after each step, optimizer state."""
    assert ours.iterations == reference.iterations, label
    assert ours.losses == reference.losses, label
    assert ours.norms == reference.norms, label
    for a, b in zip(ours.steps, reference.steps, strict=True):
        assert (a.learning_rate, a.loss_scale, a.skipped) == (
            b.learning_rate,
            b.loss_scale,
            b.skipped,
        ), label
        assert (a.global_batch_size, a.consumed_samples) == (
            b.global_batch_size,
            b.consumed_samples,
        ), label
    assert ours.weights == reference.weights, label
    assert_same_optimizer(ours, reference, label)


def assert_same_optimizer(ours: History, reference: History, label: str = "") -> None:
    """Main parameters, moments, step counts and loss scale agree bit for bit."""
    assert ours.moments.keys() == reference.moments.keys(), label
    for key, values in reference.moments.items():
        assert numpy.array_equal(ours.moments[key], values), f"{label}: {key} differs"
    assert ours.scaler == reference.scaler, label


def tail(history: History, first: int) -> History:
    """The part of a run from iteration `first` on."""
    count = sum(step.iteration < first for step in history.steps)
    return dataclasses.replace(
        history, steps=history.steps[count:], weights=history.weights[count:]
    )


def write_documents(folder: pathlib.Path, count: int, *, vocabulary: int = 119) -> str:
    """A dataset of `count` documents of 8 to 12 random tokens; returns its prefix."""
    generator = numpy.random.default_rng(count)
    builder = IndexedDatasetBuilder(str(folder / "documents.bin"), dtype=numpy.uint16)
    for length in generator.integers(8, 13, size=count):
        builder.add_item(torch.from_numpy(generator.integers(0, vocabulary, size=length)))
        builder.end_document()
    builder.finalize(str(folder / "documents.idx"))
    return str(folder / "documents")


@contextlib.contextmanager
def _recorded_samples(samples: dict[str, list[int]]) -> Iterator[None]:
    original = GPTDataset.__getitem__

    def recording(self: GPTDataset, index: int | None) -> dict[str, Any]:
        if index is not None:
            samples[self.index_split.name].append(index)
        return original(self, index)

    with mock.patch.object(GPTDataset, "__getitem__", recording):
        yield


def _record_end(history: History, trainer: Trainer) -> None:
    history.scaler = trainer.optimizer.grad_scaler.state_dict()
    for entry in trainer.optimizer.entries:
        state = trainer.optimizer.inner.state[entry.main]
        for kind, tensor in [("main", entry.main), *state.items()]:
            key = f"{kind} {entry.name}"
            if tensor.dim() == 0 or entry.slice_index is None:
                history.moments[key] = tensor.detach().reshape(-1).numpy().copy()
            else:
                values = tensor.detach().numpy()[: _used(entry)].copy()
                history._slices.setdefault(key, {})[entry.slice_index] = values


def _used(entry: OptimizerEntry) -> int:
    """Elements of a slice that are not padding."""
    assert entry.slice_index is not None
    left = entry.region.numel - entry.slice_index * entry.region.slice_numel
    return min(max(left, 0), entry.region.slice_numel)
