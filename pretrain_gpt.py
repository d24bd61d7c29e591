"""Pretrain a GPT- or Llama-shaped model.

    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 \\
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
        --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 \\
        --train-iters 20 --lr 1e-3 --log-interval 1 --eval-iters 2 --mock-data \\
        --tokenizer-type NullTokenizer --vocab-size 5000

`examples/quickstart.sh` trains on real text; `--help` lists every flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.stage_context import StageContext
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args, get_session, pretrain
from megatron.training.core_config import core_transformer_config_from_args
from megatron.training.data_sources import data_source_of

# B micro-batch, S sequence.
Batch = dict[str, torch.Tensor]
LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def model_provider(
    pre_process: bool = True, post_process: bool = True, stage: StageContext | None = None
) -> GPTModel:
    """The layers of one stage, with the embedding before or the head behind them."""
    args = get_args()
    spec = (
        import_module(args.spec)
        if args.spec
        else get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm)
    )
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=spec,
        vocab_size=get_session().padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        stage=stage,
    )


def get_batch(data_iterator: Iterator[Batch] | None, stage: StageContext) -> Batch | None:
    """This stage's part of the next micro-batch; None between the first and the last stage.

    tokens, labels, position_ids (B, S) int64; loss_mask (B, S) float32; attention_mask
    (B, 1, S, S) bool only if documents are kept apart.
    """
    if data_iterator is None:
        return None
    device = get_session().device.torch_device
    batch = next(data_iterator)
    wanted = {"attention_mask"}
    if stage.is_first:
        wanted |= {"tokens", "position_ids"}
    if stage.is_last:
        wanted |= {"labels", "loss_mask"}
    return {k: v.to(device, non_blocking=True) for k, v in batch.items() if k in wanted}


def loss_func(loss_mask: torch.Tensor | None, losses: torch.Tensor) -> LossResult:
    """(sum over tokens, number of tokens, what to log); losses and loss_mask (B, S)."""
    assert loss_mask is not None, "the stage with the loss reads the loss mask"
    mask = loss_mask.view(-1)
    total = torch.sum(losses.view(-1) * mask)
    num_tokens = mask.sum()
    logged = torch.stack([total.detach(), num_tokens])
    return total, num_tokens, {"lm loss": logged}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
    """Run one stage on one micro-batch; its input, behind the first stage, is already set."""
    stage: StageContext = model.module.stage
    batch = get_batch(data_iterator, stage) or {}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def train_valid_test_datasets_provider(sizes: Sequence[int]) -> Sequence[Any]:
    """Train, validation and test datasets of at least `sizes` samples."""
    args, session = get_args(), get_session()
    source = data_source_of(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=source.blend,
        blend_per_split=source.blend_per_split,
        split=source.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=session.tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Attention is causal by itself; only separated documents need a mask.
        create_attention_mask=args.reset_attention_mask,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    cls = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(cls, sizes, lambda: session.reads_data, config)
    return builder.build()


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


@record
def main() -> None:
    """Entry point of every rank."""
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )


if __name__ == "__main__":
    main()
