"""Scales of an e4m3 KV pool measured on a text: how large K and V of each head come to be, before the pool is in use.

e4m3 is a floating format: a number keeps its relative precision whatever its scale, unless it is past the largest or among the
subnormals, 2**-14 times as large. Room above what was measured therefore costs nothing, and one scale a head is enough. A text
is measured, and not ids drawn at random: what heads look at, a first token above all, is what their largest numbers come from.
"""

from collections.abc import Sequence

import torch

from rapid_llm.config import pages_for
from rapid_llm.errors import ConfigError
from rapid_llm.models.config import ModelConfig
from rapid_llm.modules.forward_batch import ForwardBatch
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.kv_pool import KVPool
from rapid_llm.runtime.kv_scales import KVScales
from rapid_llm.runtime.recorded_steps import Model

MARGIN = 2.0
"""K and V may be so many times as large as the largest that was measured before they are clamped."""
MOST_TOKENS = 256
"""Of the text: a small model on a CPU takes a second for them."""
_LARGEST = 448.0  # of e4m3


@torch.inference_mode()
def measured_scales(network: Model, place: Placement, model: ModelConfig, token_ids: Sequence[int]) -> KVScales:
    """Run a text through the model, over a small pool of plain numbers that is dropped afterwards.

    Args:
        network: the loaded model.
        token_ids: of the text, at least one; as many are taken as MOST_TOKENS and the model's context allow.

    Raises:
        ConfigError: K or V of a layer that are not finite.
    """
    ids = token_ids[: min(MOST_TOKENS, model.context)]
    pool = KVPool((model.num_layers, pages_for(len(ids)), model.num_kv_heads, model.head_dim), place.dtype, place.device)
    network(_one_prompt(ids, place.device), pool.layers)
    k, v = (
        torch.stack([getattr(layer, which)[: len(ids)].float().abs().amax((0, 2)) for layer in pool.layers]) for which in "kv"
    )
    for which, largest in (("K", k), ("V", v)):
        broken = (~largest.isfinite()).any(1).nonzero().flatten().tolist()
        if broken:
            got, wanted = f"NaN or infinite {which} in layer {broken[0]}", "finite numbers over a plain text"
            change = "load the model in another dtype, or leave kv_dtype out"
            raise ConfigError("scales of the KV cache cannot be measured", got=got, wanted=wanted, change=change)
    return KVScales(_scale(k), _scale(v), f"scales measured on {len(ids)} tokens, times {MARGIN:g}")


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """What takes MARGIN times the largest to the end of e4m3; 1 for a head of zeros."""
    return torch.where(largest > 0, largest * (MARGIN / _LARGEST), 1.0)


def _one_prompt(ids: Sequence[int], device: torch.device) -> ForwardBatch:
    """A step that prefills one sequence into the first pages of a pool."""

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = len(ids)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=int32(*ids),
        positions=positions,
        slot_mapping=positions,
        decode_rows=int32(),
        decode_lens=int32(),
        chunk_rows=int32(0),
        chunk_lens=int32(count),
        chunk_bounds=int32(0, count),
        longest_chunk=count,
        page_table=torch.arange(pages_for(count), dtype=torch.int32, device=device)[None],
        sampled_rows=int32(count - 1),
    )
