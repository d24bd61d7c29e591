"""The shape of a transformer, under Megatron's names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from megatron.core.model_parallel_config import ModelParallelConfig, refuse

InitMethod = Callable[[torch.Tensor], Any]

RECOMPUTE_METHODS = ("uniform", "block")
RECOMPUTE_MODULES = ("core_attn", "mlp")


def init_method_normal(std: float) -> InitMethod:
    """Fill a tensor from N(0, std)."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=std)


def scaled_init_method_normal(std: float, num_layers: int) -> InitMethod:
    """Fill from N(0, std / sqrt(2 layers)): each layer adds two branches to the residual sum."""
    return init_method_normal(std / math.sqrt(2.0 * num_layers))


@dataclass
class TransformerConfig(ModelParallelConfig):
    """What a transformer is made of.

    `__post_init__` derives what is left None (head width, groups, MLP width, init methods) and
    raises ValueError for values that do not fit together.
    """

    # Sizes. num_layers counts the whole model, not one stage.
    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None  # key/value heads; None: as many as query heads
    ffn_hidden_size: int | None = None  # None: 4 x hidden_size
    kv_channels: int | None = None  # width of a head; None: hidden_size / num_attention_heads

    # Blocks.
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # norm weights are stored minus one
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[[torch.Tensor], torch.Tensor] = functional.gelu
    bias_activation_fusion: bool = False  # with biases and GELU: its tanh form, as in Megatron
    qk_layernorm: bool = False
    rotary_interleaved: bool = False
    softmax_scale: float | None = None  # None: 1 / sqrt(kv_channels)
    attention_softmax_in_fp32: bool = True
    apply_query_key_layer_scaling: bool = False
    fp32_residual_connection: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    calculate_per_token_loss: bool = False

    # Initialisation. None: N(0, init_method_std), and scaled_init_method_normal for the matrices
    # that write into the residual stream.
    init_method: InitMethod | None = None
    output_layer_init_method: InitMethod | None = None
    init_method_std: float = 0.02

    # Recompute: "full" runs layers again in backward, "selective" the named parts of each layer.
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None

    # Split into stages, as scripts give it; the plan's placement decides.
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    # Accepted so that Megatron callers can set them; they choose kernels of other packages.
    transformer_impl: str = "local"
    attention_backend: Any = "auto"
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    memory_efficient_layer_norm: bool = False
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False
    clone_scatter_output_in_embedding: bool = True
    test_mode: bool = False

    # Refused: what they promise does not exist here.
    apply_residual_connection_post_layernorm: bool = False
    distribute_saved_activations: bool = False
    num_moe_experts: int | None = None
    window_size: tuple[int, int] | None = None
    fp8: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes()
        self._derive()
        self._check_recompute()
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it lies in [0, 1)")
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"normalization is {self.normalization!r}; choose LayerNorm or RMSNorm"
            )
        refuse(self, apply_residual_connection_post_layernorm=False, num_moe_experts=None)
        refuse(self, distribute_saved_activations=False, window_size=None, fp8=None)

    @property
    def residual_dtype(self) -> torch.dtype:
        """Of the residual stream, and so of what travels between stages."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        assert self.kv_channels is not None, "derived in __post_init__"
        return self.kv_channels

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    def recomputes(self, part: str) -> bool:
        """Whether selective recompute covers this part of a layer (of RECOMPUTE_MODULES)."""
        return self.recompute_granularity == "selective" and part in (self.recompute_modules or ())

    def _check_sizes(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; change one, or give kv_channels"
            )
        if self.num_query_groups and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups {self.num_query_groups} does not divide num_attention_heads "
                f"{self.num_attention_heads}; use a divisor of it"
            )

    def _derive(self) -> None:
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(
                self.init_method_std, self.num_layers
            )
        if self.pipeline_dtype is None:
            self.pipeline_dtype = self.residual_dtype

    def _check_recompute(self) -> None:
        if self.recompute_granularity not in (None, "full", "selective"):
            raise ValueError(
                f"recompute_granularity is {self.recompute_granularity!r}; choose full or selective"
            )
        if self.recompute_granularity == "full":
            self._check_full_recompute()
        elif self.recompute_method is not None:
            raise ValueError(
                f"recompute_method {self.recompute_method!r} needs recompute_granularity full; "
                f"it is {self.recompute_granularity!r}"
            )
        if self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]
        unknown = [name for name in self.recompute_modules if name not in RECOMPUTE_MODULES]
        if unknown:
            raise ValueError(
                f"recompute_modules names {', '.join(unknown)}; "
                f"choose from {', '.join(RECOMPUTE_MODULES)}"
            )

    def _check_full_recompute(self) -> None:
        if self.recompute_method not in RECOMPUTE_METHODS:
            raise ValueError(
                f"recompute_method is {self.recompute_method!r}; recompute_granularity full needs "
                f"one of {', '.join(RECOMPUTE_METHODS)}"
            )
        if self.recompute_num_layers is None or self.recompute_num_layers < 1:
            raise ValueError(
                f"recompute_num_layers is {self.recompute_num_layers}; recompute_granularity full "
                "needs the number of layers of a unit (uniform) or of a stage (block)"
            )
