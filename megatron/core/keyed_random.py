"""Random numbers that depend on what is drawn, never on which rank draws it.

Initial weights are keyed by (seed, global parameter name). Dropout is keyed by (seed, iteration,
micro-batch, layer, site, data-parallel rank), so that every pipeline size, schedule and
recompute setting draws the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.device import device_of

EMBEDDING_LAYER = 0  # the `layer` of dropout after the embedding; transformer layers count from 1


def random_key(*parts: int | str) -> int:
    """A 63-bit key made of the parts, the same on every machine and in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def seeded(generator: torch.Generator, key: int) -> Iterator[None]:
    """Within the block the generator draws from `key`; afterwards it goes on as before."""
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(state)


@dataclass
class RandomContext:
    """Where in training a rank is, as far as random draws care. The executor moves it along."""

    seed: int = 1234
    data_parallel_rank: int = 0
    tensor_parallel_rank: int = 0
    iteration: int = 0
    microbatch: int = 0

    def dropout_key(self, layer: int, site: str, *, per_tensor_rank: bool = False) -> int:
        """`layer` is the global layer number from 1 (0: the embedding), `site` names the place.

        `per_tensor_rank` is for activations that are split over tensor-parallel ranks.
        """
        rank = self.tensor_parallel_rank if per_tensor_rank else "all"
        where = (self.iteration, self.microbatch, layer, site)
        return random_key("dropout", self.seed, *where, self.data_parallel_rank, rank)

    @contextlib.contextmanager
    def dropout(
        self, like: torch.Tensor, layer: int, site: str, *, per_tensor_rank: bool = False
    ) -> Iterator[None]:
        """Within the block, dropout on `like`'s device draws from this place's own key."""
        key = self.dropout_key(layer, site, per_tensor_rank=per_tensor_rank)
        with seeded(device_of(like).generator, key):
            yield


def initialize_keyed(parameter: torch.nn.Parameter, seed: int, global_name: str) -> None:
    """Fill a parameter through its `init_method`, drawing from the key of its global name.

    The full tensor is drawn in fp32 and then cut to this tensor-parallel rank's share
    (`parameter.full_shape`, `parameter.shard`), so that values do not depend on the layout.
    """
    full_shape = getattr(parameter, "full_shape", parameter.shape)
    full = torch.empty(full_shape, dtype=torch.float32, device=parameter.device)
    with seeded(device_of(parameter).generator, random_key("init", seed, global_name)):
        parameter.init_method(full)  # type: ignore[attr-defined]
    shard = getattr(parameter, "shard", None)
    with torch.no_grad():
        parameter.copy_(full if shard is None else full[shard])
