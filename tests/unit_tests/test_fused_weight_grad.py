"""apex's fused weight-gradient kernels, by a stand-in that holds callers to their contract."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.device import Device
from megatron.core.fused_weight_grad import (
    EXTENSION,
    FusedAccumulation,
    find_extension,
    linear_accumulation,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.stage_context import StageContext
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.kernels import kernel_choices
from megatron.core.weight_grad_store import (
    GradTarget,
    accumulate_linear_weight_grad,
)
from tests.unit_tests.models.tiny_models import llama_config

IN, OUT, ROWS = 6, 10, (5, 3)
HALVES = (torch.float16, torch.bfloat16)


class StandIn(ModuleType):
    """What the extension does, and what it asks of its arguments (it reads raw memory)."""

    def __init__(self) -> None:
        super().__init__(EXTENSION)
        self.calls: list[str] = []

    def wgrad_gemm_accum_fp32(self, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> None:
        assert dw.dtype == torch.float32 and x.dtype in (torch.float32, *HALVES)
        self._add("fp32", x, dy, dw)

    def wgrad_gemm_accum_fp16(self, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> None:
        assert dw.dtype in HALVES and x.dtype == dw.dtype
        self._add("fp16", x, dy, dw)

    def _add(self, name: str, x: torch.Tensor, dy: torch.Tensor, dw: torch.Tensor) -> None:
        self.calls.append(name)
        assert x.dtype == dy.dtype
        assert x.dim() == dy.dim() == 2 and x.shape[0] == dy.shape[0]
        assert dw.shape == (dy.shape[1], x.shape[1])
        assert all(tensor.is_contiguous() for tensor in (x, dy, dw))
        dw.copy_(dw.double() + dy.double().t() @ x.double())  # summed exactly, rounded once


def _pieces(dtype: torch.dtype, *, strided: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, grad_output), the latter perhaps without memory of its own for each element."""
    x, grad = torch.randn(*ROWS, IN).to(dtype), torch.randn(*ROWS, OUT).to(dtype)
    return (x.transpose(0, 1), grad[:1, :1].expand(ROWS[1], ROWS[0], OUT)) if strided else (x, grad)


def _parameter(main_dtype: torch.dtype) -> Any:
    weight: Any = torch.nn.Parameter(torch.zeros(OUT, IN))
    weight.main_grad = torch.randn(OUT, IN).to(main_dtype)
    return weight


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("dtype", "main_dtype", "kernel"),
    [
        (torch.float32, torch.float32, "fp32"),
        (torch.bfloat16, torch.float32, "fp32"),
        (torch.float16, torch.float32, "fp32"),
        (torch.bfloat16, torch.bfloat16, "fp16"),
        (torch.float16, torch.float16, "fp16"),
    ],
)
def test_the_kernel_adds_what_torch_adds(
    dtype: torch.dtype, main_dtype: torch.dtype, kernel: str, strided: bool
) -> None:
    """To what is there, in the main gradient's precision, for a parameter and a further use."""
    stand_in = StandIn()
    fused = FusedAccumulation(stand_in, device_type="cpu")
    x, grad = _pieces(dtype, strided=strided)
    ours, theirs = _parameter(main_dtype), _parameter(main_dtype)
    theirs.main_grad.copy_(ours.main_grad)
    use = GradTarget(ours)
    use.main_grad = ours.main_grad.clone()
    fused(ours, x, grad)
    fused(use, x, grad)
    accumulate_linear_weight_grad(theirs, x, grad)
    assert stand_in.calls == [kernel] * 2
    tolerance = 1e-5 if main_dtype == torch.float32 else 0.05
    torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=tolerance, atol=tolerance)
    assert torch.equal(use.main_grad, ours.main_grad)
    assert ours.grad is None and theirs.grad is None


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    stand_in = StandIn()
    fused = FusedAccumulation(stand_in, device_type="cpu")
    for dtype, main_dtype in (
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ):
        x, grad = _pieces(dtype)
        ours, theirs = _parameter(main_dtype), _parameter(main_dtype)
        theirs.main_grad.copy_(ours.main_grad)
        fused(ours, x, grad)
        accumulate_linear_weight_grad(theirs, x, grad)
        assert torch.equal(ours.main_grad, theirs.main_grad)
    transposed = _parameter(torch.float32)
    transposed.main_grad = torch.zeros(IN, OUT).t()
    fused(transposed, *_pieces(torch.float32))
    elsewhere = _parameter(torch.float32)
    FusedAccumulation(stand_in)(elsewhere, *_pieces(torch.float32))  # tensors are not on CUDA
    assert stand_in.calls == []


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, EXTENSION, stand_in)
    return stand_in


@pytest.mark.parametrize("cls", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("allowed", [False, True])
def test_layers_use_it_when_it_is_there_and_allowed(
    extension: StandIn, monkeypatch: pytest.MonkeyPatch, cls: Any, allowed: bool
) -> None:
    """In B's fused form and in a later W alike."""
    monkeypatch.setattr(FusedAccumulation.__init__, "__defaults__", ("cpu",))
    options = {"input_is_parallel": True, "skip_bias_add": False}
    stage = StageContext()
    layer = cls(
        IN,
        OUT,
        config=ModelParallelConfig(gradient_accumulation_fusion=allowed),
        init_method=torch.nn.init.normal_,
        bias=True,
        stage=stage,
        **(options if cls is RowParallelLinear else {}),
    )
    x = torch.randn(*ROWS, IN)
    layer(x)[0].sum().backward()
    with stage.store.defer(0):
        layer(x)[0].sum().backward()
    assert extension.calls == ["fp32"] * allowed
    stage.store.run(0)
    assert extension.calls == ["fp32"] * 2 * allowed
    expected = 2 * x.sum((0, 1)).expand(OUT, IN)
    torch.testing.assert_close(layer.weight.grad, expected)
    assert linear_accumulation(allow_fused=False) is accumulate_linear_weight_grad


def test_a_broken_build_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the banner says so: apex built for another torch fails to load."""

    def broken(name: str) -> ModuleType:
        raise ImportError("libc10_cuda.so: undefined symbol: foo\nmore")

    config = llama_config(gradient_accumulation_fusion=True)
    cpu = Device(torch.device("cpu"))
    assert find_extension().module is None
    assert "is not installed" in kernel_choices(config, cpu)["weight gradient"]
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", broken)
        assert linear_accumulation(allow_fused=True) is accumulate_linear_weight_grad
        said = kernel_choices(config, cpu)["weight gradient"]
    assert said.startswith("torch addmm into the gradient buffer (NVIDIA apex")
    assert said.endswith("cannot be loaded: libc10_cuda.so: undefined symbol: foo)")


def test_the_banner_names_it(extension: StandIn) -> None:
    config = llama_config(gradient_accumulation_fusion=True)
    on_cpu = kernel_choices(config, Device(torch.device("cpu")))["weight gradient"]
    assert on_cpu == f"torch addmm into the gradient buffer (NVIDIA apex's {EXTENSION} needs CUDA)"
