"""Memory lines, the theoretical estimate, and counting what was built."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.stage_context import StageContext
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.memory_report import (
    ActivationSizes,
    MemoryReporter,
    ParameterCounts,
    count_parameters,
    memory_line,
    memory_scalars,
    peak_layers_in_flight,
    theoretical_report,
    weight_and_optimizer_bytes,
)

CPU = Device(torch.device("cpu"))
MB = 2**20


def test_memory_line_states_the_resident_set() -> None:
    ballast = torch.ones(2**22)  # 16 MB that exist
    line = memory_line(3, 10, CPU)
    found = re.fullmatch(
        r"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| allocated: (\d+\.\d\d) \| "
        r"max allocated: (\d+\.\d\d) \| reserved: (\d+\.\d\d) \| max reserved: (\d+\.\d\d)",
        line,
    )
    assert found is not None
    assert all(float(size) > 16 for size in found.groups())
    assert ballast.sum() == 2**22


def test_memory_is_reported_once_after_the_first_logged_step() -> None:
    reporter = MemoryReporter()
    due = [i for i in range(1, 31) if reporter.is_due(i, logged=i % 10 == 0)]
    assert due == [10]


def test_memory_interval_repeats_it() -> None:
    reporter = MemoryReporter(interval=4)
    due = [i for i in range(1, 21) if reporter.is_due(i, logged=i % 10 == 0)]
    assert due == [4, 8, 10, 12, 16, 20]


def test_memory_scalars_on_cpu_are_bytes() -> None:
    scalars = memory_scalars(CPU)
    assert list(scalars) == [
        "mem-reserved-bytes",
        "mem-allocated-bytes",
        "mem-max-allocated-bytes",
    ]
    assert all(value > 16 * MB for value in scalars.values())  # torch alone takes more


def test_memory_scalars_on_an_accelerator_add_the_block_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeCuda:
        is_cuda = True
        torch_device = torch.device("cuda", 0)

        def memory_mb(self) -> dict[str, float]:
            return {"allocated": 1, "max allocated": 2, "reserved": 3, "max reserved": 4}

    monkeypatch.setattr(
        torch.accelerator, "memory_stats", lambda device: {"allocation.all.current": 7}
    )
    device: Any = FakeCuda()
    assert memory_scalars(device) == {
        "mem-reserved-bytes": 3 * MB,
        "mem-allocated-bytes": 1 * MB,
        "mem-max-allocated-bytes": 2 * MB,
        "mem-allocated-count": 7,
    }


def mark(parameter: torch.Tensor, attribute: str) -> None:
    setattr(parameter, attribute, True)


class Stage(nn.Module):
    """Parameters under the names of a GPT stage."""

    def __init__(self, *, tied_copy: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)  # 40
        self.decoder = nn.Linear(4, 3)  # 12 + 3
        self.output_layer = nn.Linear(4, 10, bias=False)  # 40
        if tied_copy:
            mark(self.output_layer.weight, "shared")
        mark(self.embedding.weight, "tensor_model_parallel")
        mark(self.decoder.weight, "tensor_model_parallel")
        mark(self.output_layer.weight, "tensor_model_parallel")


def test_parameters_are_counted_once() -> None:
    untied = count_parameters(Stage(tied_copy=False).named_parameters())
    assert untied == ParameterCounts(15, 80, 95)
    assert untied.total == 95
    tied = count_parameters(Stage(tied_copy=True).named_parameters())
    assert tied == ParameterCounts(15, 40, 95)  # the copy takes memory, but is no parameter more


def test_one_object_under_two_names_counts_once() -> None:
    stage = Stage(tied_copy=False)
    pairs = [*stage.named_parameters(), *stage.named_parameters(prefix="module")]
    assert count_parameters(pairs) == ParameterCounts(15, 80, 95)


def test_what_is_not_split_counts_on_the_first_tensor_rank_only() -> None:
    counts = count_parameters(Stage(tied_copy=False).named_parameters(), tensor_parallel_rank=1)
    assert counts == ParameterCounts(12, 80, 95)  # without the decoder's bias


def build_gpt(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    *,
    tied: bool = False,
    stage: StageContext | None = None,
) -> GPTModel:
    """A Llama-shaped model or stage of it, without storage."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
    )
    with torch.device("meta"):
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            32000,
            4096,
            pre_process=stage is None or stage.is_first,
            post_process=stage is None or stage.is_last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            stage=stage,
        )


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ((32, 4096, 11008, 32, 32), 6_738_415_616),  # Llama-2 7B
        ((80, 8192, 28672, 64, 8), 68_976_648_192),  # Llama-2 70B
    ],
)
def test_built_llama_2_has_the_published_number_of_parameters(
    sizes: tuple[int, int, int, int, int], total: int
) -> None:
    assert count_parameters(build_gpt(*sizes).named_parameters()).total == total


def test_stages_of_a_tied_model_add_up_to_the_whole() -> None:
    sizes = (2, 64, 176, 4, 2)
    whole = count_parameters(build_gpt(*sizes, tied=True).named_parameters())
    first, second = (
        count_parameters(
            build_gpt(
                *sizes,
                tied=True,
                stage=StageContext(
                    stage=index, num_stages=2, layer_offset=index, num_layers=1, tied_head="copy"
                ),
            ).named_parameters()
        )
        for index in range(2)
    )
    assert first.total + second.total == whole.total
    assert first.embedding_layers == whole.embedding_layers == 32000 * 64
    assert second.most_loaded_shard == second.transformer_layers + 32000 * 64  # the copy


@pytest.mark.parametrize("num_microbatches, expected", [(8, 8), (4, 8), (2, 4), (1, 2)])
def test_peak_layers_of_1f1b_are_those_of_rank_0(num_microbatches: int, expected: int) -> None:
    """Rank 0 holds min(p, m) micro-batches of L/p layers: with m >= p all L layers once."""
    plan = plan_schedule("1f1b", PlanRequest(num_ranks=4, num_microbatches=num_microbatches))
    assert peak_layers_in_flight(plan, [2, 2, 2, 2]) == expected


def test_peak_layers_of_an_interleaved_plan_follow_megatrons_penalty() -> None:
    """L layers * (1 + (PP-1)/(PP*VPP)), here 8 * (1 + 1/4): rank 0's warm-up holds five chunks."""
    words = "0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3"
    other = "1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3"
    text = (
        "schedule: interleaved\nmicrobatches: 4\nplacement: 0.0 1.0 0.1 1.1\n"
        f"rank 0: {words}\nrank 1: {other}\n"
    )
    plan = Plan.from_text(text)
    assert plan.placement == Placement.looped(2, 2)
    assert peak_layers_in_flight(plan, [2, 2, 2, 2]) == 8 * (1 + 1 / 4)


def test_a_split_backward_holds_until_its_weight_gradient() -> None:
    text = "schedule: x\nmicrobatches: 2\nplacement: 0.0\nrank 0: 0F0 0B0 0F1 0W0 0B1 0W1\n"
    assert peak_layers_in_flight(Plan.from_text(text), [3]) == 6


def test_bytes_per_parameter() -> None:
    assert weight_and_optimizer_bytes(100) == 1800
    assert weight_and_optimizer_bytes(100, distributed_optimizer_size=4) == 900


def test_report_of_llama_13b() -> None:
    """Activations: 4096*1*5120*(18 + 4*13824/5120) = 603,979,776 bytes = 576 MB a layer."""
    counts = ParameterCounts(12_688_184_320, 327_680_000, 3_253_966_080)
    activations = ActivationSizes(
        seq_length=4096,
        micro_batch_size=1,
        hidden_size=5120,
        ffn_hidden_size=13824,
        tensor_parallel_size=1,
        peak_layers_in_flight=40,
    )
    assert activations.bytes_per_layer == 603_979_776
    assert theoretical_report(counts, activations=activations) == [
        "Number of parameters in transformer layers in billions:  12.69",
        "Number of parameters in embedding layers in billions: 0.33",
        "Total number of parameters in billions: 13.02",
        "Number of parameters in most loaded shard in billions: 3.2540",
        "Activation memory footprint per transformer layer: 576.0 MB",
        "Theoretical memory footprints: weight and optimizer=55858.03 MB, "
        "activation=23040.00 MB, total=78898.03 MB",
    ]


def test_report_without_activations_and_with_a_distributed_optimizer() -> None:
    counts = ParameterCounts(MB, 0, MB)
    assert theoretical_report(counts, distributed_optimizer_size=2)[-1] == (
        "Theoretical memory footprints: weight and optimizer=12.00 MB"
    )


def test_undo_copies_of_post_validation_have_a_line_of_their_own() -> None:
    """12 bytes for each parameter of the fullest rank, cut over two replicas."""
    counts = ParameterCounts(MB, 0, MB)
    without = theoretical_report(counts, distributed_optimizer_size=2)
    report = theoretical_report(counts, distributed_optimizer_size=2, undo_bytes_per_parameter=12.0)
    assert report == [
        *without,
        "Undo copies for optimizer post-validation: 6.00 MB, not in the total; held from a step to "
        "its validation in the next warm-up",
    ]


def test_tensor_parallel_ranks_share_the_activations() -> None:
    sizes = {
        "seq_length": 128,
        "micro_batch_size": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "peak_layers_in_flight": 3,
    }
    whole = ActivationSizes(**sizes, tensor_parallel_size=1)
    # With ffn = 4h the paper's 34 bytes (arXiv:2205.05198, table 2).
    assert whole.bytes_per_layer == 34 * 128 * 2 * 64
    assert ActivationSizes(**sizes, tensor_parallel_size=4).bytes == whole.bytes / 4
