"""Tiny GPT and Llama models, whole or cut into stages that run one after another in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.stage_context import StageContext
from megatron.core.transformer import TransformerConfig

VOCAB, SEQUENCE, BATCH = 96, 12, 2
EMBEDDING = "embedding.word_embeddings.weight"


def gpt_config(**changes: Any) -> TransformerConfig:
    """GPT-2's kind: LayerNorm, GELU, biases, no dropout unless asked for."""
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**fields | changes)


def llama_config(**changes: Any) -> TransformerConfig:
    """Llama's kind: RMSNorm, SwiGLU, grouped queries, no biases."""
    fields: dict[str, Any] = {
        "num_query_groups": 2,
        "ffn_hidden_size": 56,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
    }
    return gpt_config(**fields | changes)


def is_llama(config: TransformerConfig) -> bool:
    return config.normalization == "RMSNorm"


def build_stages(
    config: TransformerConfig,
    layers_per_stage: Sequence[int] | None = None,
    *,
    tied: bool = True,
    share_in_place: bool = False,
    seed: int = 7,
    **model_options: Any,
) -> list[GPTModel]:
    """The model as stages of these many layers (None: one stage), weights keyed by `seed`.

    `share_in_place`: a tied head of the last stage uses the first stage's parameter, as under a
    V placement; else it has a copy.
    """
    counts = list(layers_per_stage or [config.num_layers])
    contexts = stage_contexts(counts, share_in_place=share_in_place)
    positions = "rope" if is_llama(config) else "learned_absolute"
    options: dict[str, Any] = {"position_embedding_type": positions} | model_options
    stages = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
            VOCAB,
            SEQUENCE,
            pre_process=context.is_first,
            post_process=context.is_last,
            share_embeddings_and_output_weights=tied,
            stage=context,
            **options,
        )
        for context in contexts
    ]
    if tied and share_in_place and len(stages) > 1:
        weight = stages[0].shared_embedding_or_output_weight()
        assert weight is not None
        stages[-1].attach_shared_embedding(weight)
    for stage in stages:
        stage.initialize_weights(seed)
    use = stages[-1].output_layer.tied_use
    if use is not None:  # as a gradient buffer would: one tensor for each use of a tied weight
        use.main_grad = torch.zeros_like(use.parameter)
    return stages


def stage_contexts(counts: Sequence[int], *, share_in_place: bool) -> list[StageContext]:
    return [
        StageContext(
            stage=index,
            num_stages=len(counts),
            layer_offset=sum(counts[:index]),
            num_layers=count,
            tied_head="shared" if share_in_place or len(counts) == 1 else "copy",
        )
        for index, count in enumerate(counts)
    ]


def batch(seed: int = 3, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (B, S)."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (size, SEQUENCE + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train_step(
    stages: Sequence[GPTModel], microbatch: int = 0, *, split_backward: bool = False
) -> torch.Tensor:
    """F through the stages, then backward from the last; returns the mean loss.

    Only tensors cross from stage to stage. `split_backward`: all B first, then all W.
    """
    tokens, labels = batch(seed=100 + microbatch)
    leaves: list[torch.Tensor | None] = []
    output: torch.Tensor | None = None
    outputs: list[torch.Tensor] = []
    for stage in stages:
        stage.stage.random.microbatch = microbatch
        leaf = None if output is None else output.detach().requires_grad_()
        stage.set_input_tensor(leaf)
        output = stage(tokens, labels=labels if stage.post_process else None)
        leaves.append(leaf)
        outputs.append(output)
    loss = outputs[-1].mean()
    outputs[-1] = loss
    grad: torch.Tensor | None = None
    for stage, leaf, output in reversed(list(zip(stages, leaves, outputs, strict=True))):
        store = stage.stage.store
        with store.defer(microbatch) if split_backward else contextlib.nullcontext():
            if output.requires_grad:
                output.backward(grad)
        grad = None if leaf is None else leaf.grad
    if split_backward:
        for stage in stages:
            stage.stage.store.run(microbatch)
    return loss.detach()


def gradients(stages: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
    """By global name; the uses of a tied weight are summed once, embedding first."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for local_name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                name = stage.global_parameter_name(local_name)
                earlier = found.get(name)
                found[name] = parameter.grad if earlier is None else earlier + parameter.grad
    use = stages[-1].output_layer.tied_use
    if use is not None and use.main_grad is not None:
        found[EMBEDDING] = found[EMBEDDING] + use.main_grad
    return found


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
