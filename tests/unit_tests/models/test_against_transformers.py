"""Logits and every gradient equal those of Hugging Face's models with the same weights.

The mapping of names and layouts is section 5.8 of the compatibility specification, written out
here anew.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.activations import openai_gelu

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, LAYERS, VOCAB, SEQUENCE, BATCH = 32, 4, 3, 80, 16, 2
HEAD = HIDDEN // HEADS

Tensors = dict[str, torch.Tensor]


def _join_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Rows by group: its query heads, its key head, its value head."""
    parts = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def _llama_tensors(source: Tensors, groups: int, *, tied: bool) -> Tensors:
    """Hugging Face's weights (or gradients) of Llama under our names and in our layout."""
    ours = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
    }
    if not tied:
        ours["output_layer.weight"] = source["lm_head.weight"]
    for i in range(LAYERS):
        theirs, layer = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (source[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
        gate, up = (source[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        ours |= {
            f"{layer}input_layernorm.weight": source[f"{theirs}input_layernorm.weight"],
            f"{layer}self_attention.linear_qkv.weight": _join_qkv(q, k, v, groups),
            f"{layer}self_attention.linear_proj.weight": source[f"{theirs}self_attn.o_proj.weight"],
            f"{layer}pre_mlp_layernorm.weight": source[f"{theirs}post_attention_layernorm.weight"],
            f"{layer}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{layer}mlp.linear_fc2.weight": source[f"{theirs}mlp.down_proj.weight"],
        }
        if f"{theirs}self_attn.q_proj.bias" in source:  # Qwen 2
            biases = (source[f"{theirs}self_attn.{x}_proj.bias"] for x in "qkv")
            ours[f"{layer}self_attention.linear_qkv.bias"] = _join_qkv(*biases, groups=groups)
        if f"{theirs}self_attn.q_norm.weight" in source:  # Qwen 3
            for x in "qk":
                norm = source[f"{theirs}self_attn.{x}_norm.weight"]
                ours[f"{layer}self_attention.{x}_layernorm.weight"] = norm
    return ours


def _gpt2_tensors(source: Tensors) -> Tensors:
    """The same for GPT-2, whose matrices are stored (in, out)."""
    ours = {
        "embedding.word_embeddings.weight": source["transformer.wte.weight"],
        "embedding.position_embeddings.weight": source["transformer.wpe.weight"],
    }
    names = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        ours[f"decoder.final_layernorm.{kind}"] = source[f"transformer.ln_f.{kind}"]
        for i in range(LAYERS):
            for name, theirs in names.items():
                value = source[f"transformer.h.{i}.{theirs}.{kind}"]
                value = value.t() if value.dim() == 2 else value
                if name.endswith("qkv"):
                    value = _join_qkv(*value.chunk(3), groups=HEADS)
                ours[f"decoder.layers.{i}.{name}.{kind}"] = value
    return ours


def _randomize(model: torch.nn.Module) -> None:
    """Weights large enough that every part matters; norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def _with_grads(model: torch.nn.Module) -> Tensors:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _compare(ours: GPTModel, theirs: Any, convert: Any) -> None:
    """Copy their weights, run both on the same tokens, compare logits, loss and gradients."""
    weights = convert({n: p.detach() for n, p in theirs.named_parameters()})
    ours.load_state_dict(weights)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:]
    expected = theirs(tokens).logits
    assert _relative_error(ours(tokens), expected) < 1e-5
    expected_loss = functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    loss = ours(tokens, labels=labels)
    assert _relative_error(loss, expected_loss) < 1e-5
    expected_loss.mean().backward()
    loss.mean().backward()
    expected_grads, grads = convert(_with_grads(theirs)), _with_grads(ours)
    assert grads.keys() == expected_grads.keys() == dict(ours.named_parameters()).keys()
    for name, grad in expected_grads.items():
        assert _relative_error(grads[name], grad) < 1e-5, name


@pytest.mark.parametrize(
    ("groups", "tied", "rope_scaling", "theta"),
    [(2, False, False, 10000.0), (4, True, False, 500000.0), (1, False, True, 10000.0)],
)
def test_llama(groups: int, tied: bool, rope_scaling: bool, theta: float) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_their_llama_shape(groups) | {"tie_word_embeddings": tied}, rope_parameters=rope
        )
    )
    _randomize(theirs)
    ours = _our_llama(groups, tied=tied, rotary_base=theta, rope_scaling=rope_scaling)
    _compare(ours, theirs, lambda tensors: _llama_tensors(tensors, groups, tied=tied))


def test_biases_on_queries_keys_and_values_only() -> None:
    """As Qwen 2 has them."""
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_their_llama_shape(2)))
    _randomize(theirs)
    ours = _our_llama(2, {"add_qkv_bias": True})
    _compare(ours, theirs, lambda tensors: _llama_tensors(tensors, 2, tied=False))


def test_normalised_queries_and_keys_of_their_own_width() -> None:
    """As Qwen 3 has them: the head's width is not hidden size / heads."""
    shape = _their_llama_shape(2) | {"head_dim": 10}
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    _randomize(theirs)
    ours = _our_llama(2, {"qk_layernorm": True, "kv_channels": 10})
    _compare(ours, theirs, lambda tensors: _llama_tensors(tensors, 2, tied=False))


def _their_llama_shape(groups: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 88,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": groups,
        "max_position_embeddings": SEQUENCE,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }


def _our_llama(
    groups: int, changes: dict[str, Any] | None = None, *, tied: bool = False, **rotary: Any
) -> GPTModel:
    shape: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": groups,
        "ffn_hidden_size": 88,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    config = TransformerConfig(**shape | (changes or {}))
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        VOCAB,
        SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        **rotary,
    )


@pytest.mark.parametrize(
    ("their_gelu", "changes"),
    [
        ("gelu_new", {"activation_func": openai_gelu}),
        ("gelu_new", {"bias_activation_fusion": True}),  # as Megatron's fused kernel
        ("gelu", {"activation_func": functional.gelu}),
    ],
)
def test_gpt2(their_gelu: str, changes: dict[str, Any]) -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQUENCE,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            activation_function=their_gelu,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    _randomize(theirs)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **changes,
    )
    ours = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQUENCE,
        share_embeddings_and_output_weights=True,
    )
    _compare(ours, theirs, _gpt2_tensors)
