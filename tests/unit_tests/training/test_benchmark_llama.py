"""The benchmarks' small Llama: torch's ordinary layers compute what ours compute."""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.stage_context import StageContext
from megatron.training.benchmarks.llama import (
    LlamaSizes,
    OrdinaryStage,
    build_model,
    stage_contexts,
)

SIZES = LlamaSizes(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    vocab_size=40,
    seq_length=6,
    micro_batch_size=2,
)


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(SIZES.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def test_ordinary_layers_give_the_loss_and_gradients_of_ours() -> None:
    tokens, labels = _text()
    ours = build_model(SIZES, StageContext())
    loss = ours(tokens, labels=labels).mean()
    loss.backward()
    model = OrdinaryStage(build_model(SIZES, StageContext()))
    logits = model(tokens)
    peer_loss = functional.cross_entropy(logits.view(-1, SIZES.vocab_size), labels.view(-1))
    peer_loss.backward()
    torch.testing.assert_close(peer_loss, loss)
    theirs = dict(model.model.named_parameters())
    names = [name for name, _ in ours.named_parameters()]
    assert sorted(names) == sorted(theirs)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        torch.testing.assert_close(theirs[name].grad, parameter.grad, msg=name)


def test_stages_together_are_the_whole_model() -> None:
    tokens, _ = _text()
    whole = OrdinaryStage(build_model(SIZES, StageContext()))
    contexts = stage_contexts(SIZES, Placement.plain(2), [0, 1])
    first, last = (OrdinaryStage(build_model(SIZES, context)) for context in contexts)
    hidden = first(tokens)
    assert hidden.shape == SIZES.activation_shape
    assert torch.equal(last(hidden), whole(tokens))
