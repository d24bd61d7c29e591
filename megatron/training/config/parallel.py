"""How the model is spread over ranks, and how they talk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class ParallelArguments(ArgumentGroup):
    """Parallel sizes and communication."""

    tensor_model_parallel_size: int = arg(1, "Ranks that share each layer.", at_least=1)
    pipeline_model_parallel_size: int = arg(1, "Ranks that share the layers in turn.", at_least=1)
    sequence_parallel: bool = arg(
        False, "Split norms and dropout over the tensor-parallel ranks along the sequence."
    )
    context_parallel_size: int = arg(1, "Ranks that share each sequence.", at_least=1)
    expert_model_parallel_size: int = arg(1, "Ranks that share the experts.", at_least=1)
    expert_tensor_parallel_size: int | None = arg(
        None, "Ranks that share each expert. Without it: the tensor-parallel size.", at_least=1
    )
    use_tp_pp_dp_mapping: bool = arg(
        False, "Number ranks so that pipeline neighbours are closer than data-parallel ones."
    )
    device: Literal["auto", "cpu", "cuda"] = arg(
        "auto", "Where to train; auto takes CUDA if there is one and the backend is not gloo."
    )
    distributed_backend: Literal["nccl", "gloo"] | None = arg(
        None,
        "Communication library. Without it: nccl on CUDA, gloo on CPU (Megatron's default is "
        "always nccl).",
    )
    distributed_timeout_minutes: int = arg(
        10, "Minutes after which a collective that does not finish is an error.", at_least=1
    )
    overlap_grad_reduce: bool = arg(
        False, "Reduce a stage's gradients over data-parallel ranks while others still compute."
    )
    overlap_param_gather: bool = arg(False, "Gather sharded parameters while the forward runs.")
    overlap_p2p_comm: bool = arg(
        True,
        "Interleaved schedules of Megatron: wait for each transfer. Transfers here never block "
        "compute, so the flag only sets the name.",
        flags=("--no-overlap-p2p-communication", "--disable-overlap-p2p-communication"),
    )

    def device_type(self, cuda_available: bool) -> Literal["cpu", "cuda"]:
        """The device to train on. Raises ValueError if CUDA is asked for and missing."""
        if self.device == "cuda" and not cuda_available:
            raise ValueError("--device cuda: no CUDA device is available; use --device cpu")
        if self.device != "auto":
            return self.device
        return "cuda" if cuda_available and self.distributed_backend != "gloo" else "cpu"

    def backend(self, cuda_available: bool) -> Literal["nccl", "gloo"]:
        """The communication library. Raises ValueError if nccl is asked for without CUDA."""
        on_cuda = self.device_type(cuda_available) == "cuda"
        if self.distributed_backend == "nccl" and not on_cuda:
            raise ValueError(
                "--distributed-backend nccl needs a CUDA device and none is available; use gloo, "
                "or leave the flag out"
            )
        return self.distributed_backend or ("nccl" if on_cuda else "gloo")

    def problems(self) -> Iterator[str]:
        """A backend that fits the device; overlaps with what they need."""
        if self.device == "cpu" and self.distributed_backend == "nccl":
            yield "--distributed-backend nccl does not work with --device cpu; use gloo"
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield "--overlap-param-gather needs --overlap-grad-reduce; add it"


@dataclass(frozen=True, kw_only=True)
class PipelineArguments(ArgumentGroup):
    """Pipeline schedule and split of the layers."""

    pipeline_schedule: str | None = arg(
        None,
        f"Schedule by name ({', '.join(SCHEDULES)}), or a file that holds a plan. Without it: "
        "1f1b, unless another flag asks for interleaving or zero bubble.",
        metavar="NAME|FILE",
    )
    num_layers_per_stage: tuple[int, ...] | None = arg(
        None, "Layers of every stage, in model order.", metavar="N", at_least=0
    )
    decoder_first_pipeline_num_layers: int | None = arg(
        None, "Layers on the first pipeline rank; the rest is shared evenly.", at_least=0
    )
    decoder_last_pipeline_num_layers: int | None = arg(
        None, "Layers on the last pipeline rank; the rest is shared evenly.", at_least=0
    )
    account_for_embedding_in_pipeline_split: bool = arg(
        False, "Count the embedding as one layer when sharing layers out."
    )
    account_for_loss_in_pipeline_split: bool = arg(
        False, "Count the output layer and loss as one layer when sharing layers out."
    )
    pipeline_model_parallel_layout: str | None = arg(
        None,
        'Stages as text, e.g. "Et*3|(tt|)*29,tL": E embedding, t layer, L loss, | next stage.',
    )
    allow_padding_num_layers: bool = arg(
        False,
        "Let the layer count be any number: the stages that hold the head and the embedding, then "
        "the following ones, get one layer less.",
    )
    standalone_embedding_stage: bool = arg(
        False, "Give the first pipeline rank the embedding and no layer."
    )
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "Interleaved schedule with this many layers per chunk.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, "Interleaved schedule with this many chunks per rank.", at_least=1
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = arg(
        None,
        "Interleaved schedule: micro-batches a chunk runs before the rank turns to the next one. "
        "Without it: the pipeline size.",
        at_least=1,
    )
    debug_pipeline_messages: bool = arg(
        False, "Send with every tensor what it is, and stop at the first mismatch."
    )

    def problems(self) -> Iterator[str]:
        """One way of splitting layers, one way of stating chunks."""
        ways = self._split_flags()
        if len(ways) > 1:
            yield f"{' and '.join(ways)} each split the layers; give one"
        chunks = {
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
            "--pipeline-model-parallel-layout": self.pipeline_model_parallel_layout,
        }
        given = [f"{flag} {value}" for flag, value in chunks.items() if value is not None]
        if len(given) > 1:
            yield f"{' and '.join(given)} each set the number of chunks; give one"

    def _split_flags(self) -> list[str]:
        """The mechanisms in use that decide which stage holds which layers."""
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        account = (
            self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        )
        used = {
            "--num-layers-per-stage": self.num_layers_per_stage is not None,
            "--decoder-first/last-pipeline-num-layers": first is not None or last is not None,
            "--account-for-embedding/loss-in-pipeline-split": account,
            "--pipeline-model-parallel-layout": self.pipeline_model_parallel_layout is not None,
            "--standalone-embedding-stage": self.standalone_embedding_stage,
        }
        return [flag for flag, is_used in used.items() if is_used]
