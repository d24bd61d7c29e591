"""Parts that do nothing, for specs that leave a place empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Returns its first argument; takes any constructor arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """For places that hold a function of functions, such as bias-dropout-add."""

    def forward(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return super().forward
