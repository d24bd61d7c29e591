"""The optimizer step against plain torch, clipping by hand, overflow, loss scale, buffers."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.entries import global_order
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.weight_grad_store import GradTarget


def _model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7)).to(dtype)


def _wrapped(model: torch.nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(SimpleNamespace(), DistributedDataParallelConfig(), model)


def _optimizer(chunk: DistributedDataParallel, **options: object) -> MegatronOptimizer:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, **options)  # type: ignore[arg-type]
    return MegatronOptimizer(config, [chunk], norm_group=None, data_parallel_group=None)


def _fill_gradients(chunk: DistributedDataParallel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for region in chunk.regions():
        grad = torch.randn(region.parameter.shape, generator=generator)
        region.target.main_grad.copy_(grad)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_adamw_equals_torch_with_clipping_and_no_decay_on_norms_and_biases(clip: float) -> None:
    chunk = _wrapped(_model())
    ours = _optimizer(chunk, clip_grad=clip)
    reference = copy.deepcopy(_model())
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    plain = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(4):
        _fill_gradients(chunk, step)
        for mine, other in zip(chunk.module.parameters(), reference.parameters(), strict=True):
            other.grad = mine.main_grad.clone()
        norm = torch.linalg.vector_norm(
            torch.cat([p.grad.view(-1) for p in reference.parameters()])
        )
        if clip and norm > clip:
            for parameter in reference.parameters():
                parameter.grad.mul_(clip / (norm.item() + 1e-6))
        result = ours.step()
        theirs.step()
        assert result.applied
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, other in zip(chunk.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_sgd_with_momentum_equals_torch() -> None:
    chunk = _wrapped(_model())
    ours = _optimizer(chunk, optimizer="sgd", clip_grad=0.0)
    reference = _model()
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.dim() == 1]},
    ]
    theirs = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    for step in range(3):
        _fill_gradients(chunk, step)
        for mine, other in zip(chunk.module.parameters(), reference.parameters(), strict=True):
            other.grad = mine.main_grad.clone()
        ours.step()
        theirs.step()
    for mine, other in zip(chunk.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing(bad: float) -> None:
    chunk = _wrapped(_model())
    optimizer = _optimizer(chunk)
    before = [p.detach().clone() for p in chunk.module.parameters()]
    _fill_gradients(chunk, 0)
    next(iter(chunk.module.parameters())).main_grad[0, 0] = bad
    result = optimizer.step()
    assert not result.applied and not math.isfinite(result.grad_norm)
    for old, new in zip(before, chunk.module.parameters(), strict=True):
        assert torch.equal(old, new)
    assert all(float(state["step"]) == 0 for state in optimizer.inner.state.values())


def test_bf16_steps_an_fp32_copy_so_that_small_updates_are_not_lost() -> None:
    chunk = _wrapped(_model(torch.bfloat16))
    config = OptimizerConfig(lr=1e-4, weight_decay=0.0, clip_grad=0.0, bf16=True)
    optimizer = MegatronOptimizer(config, [chunk], norm_group=None, data_parallel_group=None)
    weight = next(iter(chunk.module.parameters()))
    start = weight.detach().float().clone()
    for _ in range(20):
        weight.main_grad.fill_(1.0)
        optimizer.step()
    entry = next(e for e in optimizer.entries if e.parameter is weight)
    torch.testing.assert_close(start - entry.main, torch.full_like(start, 20e-4), rtol=1e-3, atol=0)
    assert torch.equal(weight, entry.main.bfloat16())


def test_fp16_loss_scale_is_taken_out_before_the_norm() -> None:
    chunk = _wrapped(_model())
    plain = _optimizer(chunk, clip_grad=0.0)
    _fill_gradients(chunk, 3)
    expected = plain.grad_norm()
    scaled = _optimizer(chunk, clip_grad=0.0, fp16=True, initial_loss_scale=2.0**10)
    for region in chunk.regions():
        region.target.main_grad.mul_(2.0**10)
    assert float(scaled.scale_loss(torch.tensor(1.0))) == 2.0**10
    assert scaled.step().grad_norm == pytest.approx(expected, rel=1e-7)


def test_dynamic_scale_grows_after_clean_steps_and_halves_after_hysteresis() -> None:
    scaler = DynamicGradScaler(initial_scale=8.0, min_scale=1.0, growth_interval=2, hysteresis=2)
    history = []
    for found_inf in (True, True, True, False, False, True, True, True, True, True, True):
        scaler.update(found_inf)
        history.append(scaler.scale)
    assert history == [8, 4, 2, 2, 4, 4, 2, 1, 1, 1, 1]
    other = DynamicGradScaler(initial_scale=1.0, min_scale=1.0, growth_interval=2, hysteresis=2)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_number_of_zeros_counts_gradients_not_padding() -> None:
    chunk = _wrapped(_model())
    optimizer = _optimizer(chunk, log_num_zeros_in_grad=True)
    _fill_gradients(chunk, 1)
    next(iter(chunk.module.parameters())).main_grad[:2, :3] = 0
    assert optimizer.step().num_zeros == 6


def test_main_gradients_are_aligned_and_cut_evenly() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 33, 1000)]
    buffer = GradBuffer([(f"p{i}", p) for i, p in enumerate(parameters)], data_parallel_size=3)
    for region, parameter in zip(buffer.regions, parameters, strict=True):
        assert parameter.main_grad.data_ptr() % 64 == buffer.data.data_ptr() % 64
        assert region.slice_numel * 3 >= parameter.numel()
        assert buffer.slices(region).shape == (3, region.slice_numel)
        parameter.main_grad.fill_(1.0)
    assert buffer.data.sum() == 1034  # no two regions overlap


def test_both_uses_of_a_tied_weight_are_summed_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))

    class Tied(torch.nn.Module):
        share_embeddings_and_output_weights = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = weight
            self.output_layer = SimpleNamespace(tied_use=GradTarget(weight))

        def global_parameter_name(self, name: str) -> str:
            return "embedding.word_embeddings.weight"

    chunk = _wrapped(Tied())
    weight.main_grad.fill_(1.0)
    chunk.module.output_layer.tied_use.main_grad.fill_(2.0)
    finalize_model_grads([chunk])
    assert torch.equal(weight.main_grad, torch.full((4, 2), 3.0))
    optimizer = _optimizer(chunk, clip_grad=0.0)
    assert len(optimizer.entries) == 1
    assert optimizer.grad_norm() == pytest.approx(3.0 * math.sqrt(8))


def test_per_token_gradients_are_divided_once_by_the_token_count() -> None:
    chunk = _wrapped(_model())
    _fill_gradients(chunk, 5)
    before = chunk.buffer.data.clone()
    finalize_model_grads([chunk], torch.tensor(8))
    assert torch.equal(chunk.buffer.data, before / 8)


def test_autograd_gradients_are_added_and_dropped() -> None:
    chunk = _wrapped(_model())
    x = torch.randn(3, 5)
    for _ in range(2):
        chunk(x).sum().backward()
        chunk.collect_autograd_gradients()
    reference = _model()
    (2 * reference(x).sum()).backward()
    for mine, other in zip(chunk.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, other.grad)
        assert mine.grad is None


def test_layer_2_comes_before_layer_10() -> None:
    names = ["decoder.layers.10.w", "decoder.layers.2.w", "decoder.final", "embedding.w"]
    ordered = sorted(names, key=global_order)
    assert ordered.index("decoder.layers.2.w") < ordered.index("decoder.layers.10.w")


def test_unknown_optimizer_and_both_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="--optimizer lion"):
        OptimizerConfig(optimizer="lion")
    with pytest.raises(ValueError, match="exclude each other"):
        OptimizerConfig(fp16=True, bf16=True)
