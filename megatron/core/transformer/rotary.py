"""Rotary position embeddings (arXiv:2104.09864): queries and keys are rotated by their position."""

# S sequence, B micro-batch, G key/value heads (groups), R query heads per group, D head width,
# D' <= D rotated channels.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Rotation(NamedTuple):
    """cos and sin of every position's angles, (S, 1, 1, 1, D'/2), and which channels pair up."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool  # pairs (0, 1), (2, 3), ...; else channel i with channel i + D'/2


class RotaryEmbedding(torch.nn.Module):
    """Makes rotations; angles are computed in fp32 and kept per (length, device, dtype).

    `rotary_percent` of the head's channels rotate. `seq_len_interpolation_factor` divides
    positions. `rope_scaling` lowers the slow frequencies by `rope_scaling_factor` as Llama 3.1
    does, for contexts beyond the 8192 tokens it was trained on.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
    ) -> None:
        super().__init__()
        self.dim = int(kv_channels * rotary_percent)
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"rotary_percent {rotary_percent} of kv_channels {kv_channels} rotates {self.dim} "
                "channels; channels rotate in pairs, so make it an even number"
            )
        self.interleaved = rotary_interleaved
        self.interpolation = seq_len_interpolation_factor
        self.base = rotary_base
        self.scaling_factor = rope_scaling_factor if rope_scaling else None
        self._rotations: dict[tuple[int, torch.device, torch.dtype], Rotation] = {}

    def forward(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """The rotation of positions 0 .. seq_len - 1."""
        key = (seq_len, device, dtype)
        if key not in self._rotations:
            self._rotations[key] = self._rotation(*key)
        return self._rotations[key]

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians per position of each channel pair, (D'/2,), fp32."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        frequencies = 1.0 / self.base**exponents
        if self.scaling_factor is None:
            return frequencies
        return _llama31_scaling(frequencies, self.scaling_factor)

    @torch.no_grad()
    def _rotation(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        positions = torch.arange(seq_len, dtype=torch.float32, device="cpu")
        if self.interpolation is not None:
            positions /= self.interpolation
        angles = torch.outer(positions, self.inverse_frequencies()).view(seq_len, 1, 1, 1, -1)
        cos, sin = (t.to(device, dtype) for t in (angles.cos(), angles.sin()))
        return Rotation(cos, sin, self.interleaved)


def _llama31_scaling(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Llama 3.1's scaling: waves that fit the old context 4 times stay, ones longer than it slow
    down by `factor`, those between are blended."""
    old_context, low_factor, high_factor = 8192, 1.0, 4.0
    turns = old_context * frequencies / (2.0 * math.pi)  # of a wave within the old context
    blend = ((turns - low_factor) / (high_factor - low_factor)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / factor)


def split_qkv(
    qkv: torch.Tensor, heads_per_group: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(S, B, G (R + 2) D) -> queries (S, B, G R, D), keys and values (S, B, G, D).

    The channels of a group are its R query heads, its key, its value.
    """
    grouped = qkv.unflatten(-1, (-1, heads_per_group + 2, head_dim))
    if heads_per_group == 1:
        return grouped.unbind(3)  # fewer views than the way below
    q, k, v = grouped.split((heads_per_group, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def split_and_rotate_qkv(
    qkv: torch.Tensor, heads_per_group: int, head_dim: int, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_qkv` with queries and keys rotated."""
    grouped = qkv.unflatten(-1, (-1, heads_per_group + 2, head_dim))
    return _SplitAndRotate.apply(grouped, rotation)


def apply_rotary_pos_emb(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate x (S, B, heads, D) by position."""
    return _Rotate.apply(x.unsqueeze(3), rotation).squeeze(3)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        ctx.rotation = rotation
        return _rotate_into(torch.empty_like(x), x, rotation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rotate_into(torch.empty_like(grad), grad, ctx.rotation, backwards=True), None


class _SplitAndRotate(torch.autograd.Function):
    """(S, B, G, R + 2, D) -> q (S, B, G R, D), k and v (S, B, G, D).

    The results are tensors of their own, so that attention keeps nothing of its input but them,
    and backward writes the three gradients straight into one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.rotation = rotation
        s, b, g, heads, d = qkv.shape
        q_in, k_in, v_in = qkv.split((heads - 2, 1, 1), dim=3)
        q = _rotate_into(qkv.new_empty(s, b, g, heads - 2, d), q_in, rotation)
        k = _rotate_into(qkv.new_empty(s, b, g, 1, d), k_in, rotation)
        v = v_in.clone(memory_format=torch.contiguous_format)
        return q.view(s, b, g * (heads - 2), d), k.view(s, b, g, d), v.view(s, b, g, d)

    @staticmethod
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        s, b, g, d = grad_k.shape
        r = grad_q.shape[2] // g
        grad = grad_q.new_empty(s, b, g, r + 2, d)
        q_part, k_part, v_part = grad.split((r, 1, 1), dim=3)
        _rotate_into(q_part, grad_q.unflatten(2, (g, r)), ctx.rotation, backwards=True)
        _rotate_into(k_part, grad_k.unsqueeze(3), ctx.rotation, backwards=True)
        v_part.copy_(grad_v.unsqueeze(3))
        return grad, None


def _rotate_into(
    out: torch.Tensor, x: torch.Tensor, rotation: Rotation, *, backwards: bool = False
) -> torch.Tensor:
    """Write x (S, B, G, heads, D) rotated into `out`; channels beyond D' are copied."""
    cos, sin, interleaved = rotation
    dim, sign = 2 * cos.shape[-1], -1 if backwards else 1
    if dim < x.shape[-1]:
        out[..., dim:] = x[..., dim:]
        _rotate_into(out[..., :dim], x[..., :dim], rotation, backwards=backwards)
        return out
    (x1, x2), (out1, out2) = _pairs(x, interleaved), _pairs(out, interleaved)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, ...]:
    """The first and the second channel of each rotated pair."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
