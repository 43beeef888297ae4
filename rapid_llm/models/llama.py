"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and what shares its shape."""

from collections.abc import Iterator, Sequence

import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.modules.attention import Attention
from rapid_llm.modules.embedding import Embedding, Head
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.mlp import GatedMLP
from rapid_llm.modules.norm import RMSNorm
from rapid_llm.modules.placement import Placement
from rapid_llm.modules.rotary import Rotary
from rapid_llm.modules.weights import Layer, WeightSlot


class LlamaLayer:
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, place: Placement, config: ModelConfig, name: str, rotary: Rotary) -> None:
        self.input_norm = RMSNorm(place, f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
            place,
            f"{name}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
        )
        self.post_norm = RMSNorm(place, f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(place, f"{name}.mlp", config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, pool: LayerPool) -> torch.Tensor:
        """``x`` [T, hidden_size] is what the layer before adds to ``residual``; returns what this one adds. Writes the pool."""
        x = self.attention(self.input_norm.add(x, residual), batch, pool)
        return self.mlp(self.post_norm.add(x, residual))

    def weights(self) -> Iterator[WeightSlot]:
        """All four parts'."""
        parts: tuple[Layer, ...] = (self.input_norm, self.attention, self.post_norm, self.mlp)
        for part in parts:
            yield from part.weights()


class LlamaForCausalLM:
    """Token ids in, logits of the sampled rows out.

    Args:
        place: device, dtype and kernels.
        config: the checkpoint's.
        max_positions: longest sequence it will see.
        tied_head: whether the checkpoint holds no head of its own.
    """

    def __init__(self, place: Placement, config: ModelConfig, *, max_positions: int, tied_head: bool) -> None:
        rotary = Rotary(place, rotary_dim=config.head_dim, theta=config.rope_theta, max_positions=max_positions)
        self.embedding = Embedding(place, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(place, config, f"model.layers.{i}", rotary) for i in range(config.num_layers)]
        self.norm = RMSNorm(place, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = Head(place, "lm_head", self.embedding, tied=tied_head)

    def __call__(self, batch: ForwardBatch, pools: Sequence[LayerPool]) -> torch.Tensor:
        """Run one packed step over the per-layer ``pools``; logits [S, vocab_size] of ``batch.sampled_rows``."""
        x = self.embedding(batch.token_ids)
        residual = torch.zeros_like(x)
        for layer, pool in zip(self.layers, pools, strict=True):
            x = layer(x, residual, batch, pool)
        return self.head(self.norm.add(x, residual), batch.sampled_rows)

    def weights(self) -> Iterator[WeightSlot]:
        """Every place that the checkpoint must fill."""
        parts: tuple[Layer, ...] = (self.embedding, *self.layers, self.norm, self.head)
        for part in parts:
            yield from part.weights()
