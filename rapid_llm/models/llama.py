"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and what shares its shape: Mistral, Qwen2, Qwen3, and
their sparse kin, Mixtral and Qwen3-MoE.

What they differ in, biases, norms of q and k, and layers of experts, stands in ModelConfig.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import cast

import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.modules.attention import Attention, AttentionSizes
from rapid_llm.modules.embedding import Embedding, Head
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.mlp import GatedMLP
from rapid_llm.modules.moe import MixtureOfExperts, MixtureSizes
from rapid_llm.modules.norm import RMSNorm
from rapid_llm.modules.placement import Placement
from rapid_llm.modules.rotary import Rotary
from rapid_llm.quantization.w8a8 import Activations
from rapid_llm.weights import Layer, WeightSlot


class LlamaLayer:
    """Norm, attention, residual; norm, feed-forward, residual."""

    def __init__(self, place: Placement, config: ModelConfig, number: int, rotary: Rotary) -> None:
        name = f"model.layers.{number}"
        sizes = AttentionSizes(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
        self.attention = Attention(place, f"{name}.self_attn", rotary, sizes)
        self.mlp = _feed_forward(place, config, name, number)
        width, eps = config.hidden_size, config.rms_norm_eps
        feeds = self.mlp.gate_up.takes_fp8 if isinstance(self.mlp, GatedMLP) else None
        self.input_norm = RMSNorm(place, f"{name}.input_layernorm", width, eps, reader=self.attention.qkv.takes_fp8)
        self.post_norm = RMSNorm(place, f"{name}.post_attention_layernorm", width, eps, reader=feeds)

    def __call__(
        self, x: Activations, residual: torch.Tensor, batch: ForwardBatch, pool: LayerPool, next_norm: RMSNorm
    ) -> Activations:
        """Run the layer on ``x`` [T, hidden_size], which its input norm has seen; returns what ``next_norm`` makes of its output.

        ``residual`` [T, hidden_size] is brought up to date in place, and ``pool`` gets the step's K and V.
        """
        x = self.post_norm.add(self.attention(x, batch, pool), residual)
        x = self.mlp(x) if isinstance(self.mlp, GatedMLP) else self.mlp(_plain(x))
        return next_norm.add(x, residual)

    def weights(self) -> Iterator[WeightSlot]:
        """All four parts'."""
        parts: tuple[Layer, ...] = (self.input_norm, self.attention, self.post_norm, self.mlp)
        for part in parts:
            yield from part.weights()


def _plain(x: Activations) -> torch.Tensor:
    """What a norm without a reader has left."""
    return cast("torch.Tensor", x)


def _feed_forward(place: Placement, config: ModelConfig, name: str, number: int) -> GatedMLP | MixtureOfExperts:
    """That of layer ``number``, called ``name``."""
    experts = config.experts
    if experts is None or number in experts.dense_layers:
        return GatedMLP(place, f"{name}.mlp", config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    names = experts.names
    sizes = MixtureSizes(
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        renormalise=experts.renormalise,
        parts=(names.gate, names.up, names.down),
    )
    return MixtureOfExperts(place, f"{name}.{names.block}", sizes)


class LlamaForCausalLM:
    """Token ids in, logits of the sampled rows out.

    Args:
        place: device, dtype and kernels.
        config: the checkpoint's.
        max_positions: longest sequence it will see.
        tied_head: whether the checkpoint holds no head of its own.
    """

    def __init__(self, place: Placement, config: ModelConfig, *, max_positions: int, tied_head: bool) -> None:
        rotary = Rotary(
            place,
            rotary_dim=config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            max_positions=max_positions,
        )
        self.embedding = Embedding(place, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(place, config, i, rotary) for i in range(config.num_layers)]
        self.norm = RMSNorm(place, "model.norm", config.hidden_size, config.rms_norm_eps)
        # Every sum into the residual is followed by a norm, so the two are one kernel: a layer ends with the next one's norm.
        self.next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.head = Head(place, "lm_head", self.embedding, tied=tied_head)

    def __call__(self, batch: ForwardBatch, pools: Sequence[LayerPool]) -> torch.Tensor:
        """Run one packed step over the per-layer ``pools``; logits [S, vocab_size] of ``batch.sampled_rows``."""
        return self.head(self.hidden(batch, pools), batch.sampled_rows)

    def hidden(self, batch: ForwardBatch, pools: Sequence[LayerPool]) -> torch.Tensor:
        """The same up to the head: hidden states [T, hidden_size] of all tokens, behind the last norm."""
        residual = self.embedding(batch.token_ids)
        x: Activations = self.layers[0].input_norm(residual)
        for layer, pool, next_norm in zip(self.layers, pools, self.next_norms, strict=True):
            x = layer(x, residual, batch, pool, next_norm)
        return _plain(x)

    def of_distinct_layers(self) -> Callable[[ForwardBatch, Sequence[LayerPool]], torch.Tensor]:
        """The model without layers that launch what one before them does: whose weights have the same names, shapes and kinds.

        What it computes is of no use, but once it has run nothing is left to be compiled or loaded for the whole model. To be
        asked before weights are loaded.
        """
        kinds: dict[tuple[object, ...], LlamaLayer] = {}
        for number, layer in enumerate(self.layers):
            slots = ((slot.name.replace(f".{number}.", ".", 1), slot) for slot in layer.weights())
            kinds.setdefault(tuple((name, slot.target.shape, slot.dtypes, type(slot.target)) for name, slot in slots), layer)
        short = copy(self)
        short.layers = list(kinds.values())
        short.next_norms = self.next_norms[-len(kinds) :]
        return lambda batch, pools: short(batch, pools[: len(kinds)])

    def weights(self) -> Iterator[WeightSlot]:
        """Every place that the checkpoint must fill."""
        parts: tuple[Layer, ...] = (self.embedding, *self.layers, self.norm, self.head)
        for part in parts:
            yield from part.weights()
