"""The real fused weight-gradient kernels of NVIDIA apex, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.fused_weight_grad import EXTENSION, FusedAccumulation
from megatron.core.weight_grad_store import accumulate_linear_weight_grad

pytestmark = pytest.mark.gpu


def _parameter(device: torch.device) -> Any:
    weight: Any = torch.nn.Parameter(torch.zeros(96, 64, device=device))
    weight.main_grad = torch.ones(96, 64, device=device)
    return weight


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_kernels_add_what_torch_adds(dtype: torch.dtype, strided: bool) -> None:
    fused = FusedAccumulation(pytest.importorskip(EXTENSION))
    device = torch.device("cuda")
    x = torch.randn(33, 4, 64, device=device).to(dtype)
    grad = torch.randn(33, 4, 96, device=device).to(dtype)
    if strided:
        x, grad = x.transpose(0, 1), grad[:1, :1].expand(4, 33, 96)
    ours, theirs = (_parameter(device), _parameter(device))
    fused(ours, x, grad)
    accumulate_linear_weight_grad(theirs, x, grad)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=tolerance, atol=tolerance)
