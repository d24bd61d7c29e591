"""FLOPs formulas against published sizes, a hand count and torch's own counter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.throughput import (
    ModelSizes,
    causal_flops_per_sample,
    flops_formula,
    full_attention_flops_per_sample,
    tflops_per_gpu,
    throughput_notice,
)

LLAMA_7B = ModelSizes(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    padded_vocab_size=32000,
    seq_length=4096,
    swiglu=True,
)
LLAMA_70B = dataclasses.replace(
    LLAMA_7B,
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
)
# A GELU model whose head width is not hidden / heads and whose ffn is not 4 x hidden.
ODD = ModelSizes(
    num_layers=3,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=10,
    padded_vocab_size=96,
    seq_length=16,
    swiglu=False,
)


def test_llama_2_values() -> None:
    assert causal_flops_per_sample(LLAMA_7B) == 175_569_673_125_888
    assert full_attention_flops_per_sample(LLAMA_7B) == 188_763_812_659_200
    assert causal_flops_per_sample(LLAMA_70B) == 1_754_665_939_107_840
    assert full_attention_flops_per_sample(LLAMA_70B) == 1_820_636_636_774_400


@pytest.mark.parametrize("sizes", [LLAMA_7B, LLAMA_70B, ODD])
def test_full_attention_equals_the_forks_expression(sizes: ModelSizes) -> None:
    s, layers, h = sizes.seq_length, sizes.num_layers, sizes.hidden_size
    query = sizes.kv_channels * sizes.num_attention_heads
    expected = (12 * s * layers * h**2) * (
        (1 + sizes.num_query_groups / sizes.num_attention_heads + s / h) * query / h
        + (sizes.ffn_hidden_size / h) * (1.5 if sizes.swiglu else 1)
        + sizes.padded_vocab_size / (2 * layers * h)
    )
    assert math.isclose(full_attention_flops_per_sample(sizes), expected, rel_tol=1e-12)


@pytest.mark.parametrize("swiglu", [False, True])
def test_full_attention_equals_what_torch_counts(swiglu: bool) -> None:
    """A model written out as plain matrix products, forward and backward, under torch's counter."""
    sizes = dataclasses.replace(ODD, swiglu=swiglu)
    h, f, width = sizes.hidden_size, sizes.ffn_hidden_size, sizes.kv_channels
    heads, groups, s = sizes.num_attention_heads, sizes.num_query_groups, sizes.seq_length

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, requires_grad=True)

    x = torch.randn(s, h, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        hidden = x
        for _ in range(sizes.num_layers):
            q = (hidden @ weight(h, heads * width)).view(s, heads, width).transpose(0, 1)
            k = (hidden @ weight(h, groups * width)).view(s, groups, width).transpose(0, 1)
            v = (hidden @ weight(h, groups * width)).view(s, groups, width).transpose(0, 1)
            k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (k, v))
            mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
            hidden = hidden + mixed.transpose(0, 1).reshape(s, -1) @ weight(heads * width, h)
            inner = hidden @ weight(h, f)
            if swiglu:
                inner = inner.sigmoid() * (hidden @ weight(h, f))
            hidden = hidden + inner @ weight(f, h)
        (hidden @ weight(h, sizes.padded_vocab_size)).sum().backward()
    assert full_attention_flops_per_sample(sizes) == counter.get_total_flops()


def test_causal_leaves_out_half_of_the_scores() -> None:
    """Scores and their product with the values, forward and twice backward, per layer and head."""
    scores = 3 * 2 * (2 * ODD.seq_length**2 * ODD.kv_channels)
    all_scores = scores * ODD.num_layers * ODD.num_attention_heads
    difference = full_attention_flops_per_sample(ODD) - causal_flops_per_sample(ODD)
    assert difference == all_scores // 2


def test_each_size_counts() -> None:
    base = causal_flops_per_sample(ODD)
    larger = {
        "num_layers": 4,
        "ffn_hidden_size": 41,
        "num_query_groups": 4,
        "padded_vocab_size": 128,
        "swiglu": True,
    }
    for name, value in larger.items():
        changed = dataclasses.replace(ODD, **{name: value})  # type: ignore[arg-type]
        assert causal_flops_per_sample(changed) > base, name


def test_tflops_per_gpu() -> None:
    assert tflops_per_gpu(flops=8e15, seconds=4.0, world_size=10) == pytest.approx(200.0)
    assert math.isnan(tflops_per_gpu(8e15, 0.0, 10))


def test_the_notice_states_formula_and_sizes() -> None:
    notice = throughput_notice("causal", LLAMA_70B)
    assert "1755 TFLOP" in notice and "causal" in notice
    assert "ffn 28672 in 3 matrices" in notice and "recomputation is not counted" in notice
    assert "full attention" in throughput_notice("full", LLAMA_70B)


def test_bad_names_and_sizes() -> None:
    with pytest.raises(ValueError, match="'half'; choose from causal, full"):
        flops_formula("half")
    with pytest.raises(ValueError, match="num_layers is 0"):
        dataclasses.replace(ODD, num_layers=0)
