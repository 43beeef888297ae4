"""The experts of a sparse model: how many, how large, in which layers, and what its checkpoints call them. Data, torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rapid_llm.models.config_keys import Keys

HF_COUNTS = ("num_experts", "num_local_experts")
"""Keys of config.json that say how many experts a layer has; exports have one or the other."""

MAX_EXPERTS = 10_000


@dataclass(frozen=True)
class ExpertNames:
    """What a Hugging Face checkpoint calls the parts of a sparse layer.

    Attributes:
        block: the layer's feed-forward; "<block>.gate" is its router, "<block>.experts.<number>" an expert.
        gate, up, down: an expert's matrices.
    """

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        names: what the checkpoint calls them.
        num_experts, top_k: experts of a layer, and how many of them see a token.
        intermediate_size: of one expert.
        renormalise: whether the weights of a token's experts are made to sum to 1.
        dense_layers: numbers of the layers that have one feed-forward of the model's intermediate size instead.
    """

    names: ExpertNames
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()


def experts_from_hf(names: ExpertNames, keys: Keys, num_layers: int, intermediate_size: int) -> Experts:
    """The experts of a config.json whose architecture has them.

    Raises:
        CheckpointError: a key that is missing, of the wrong kind, or that contradicts another.
    """
    given = [key for key in HF_COUNTS if keys.raw.get(key) is not None]
    num_experts = keys.size(given[0] if given else HF_COUNTS[0], high=MAX_EXPERTS)
    if keys.size(given[-1] if given else HF_COUNTS[0]) != num_experts:
        raise keys.refused(given[-1], f"as many as {given[0]} says, {num_experts}")
    step, only = keys.size("decoder_sparse_step", default=1), keys.raw.get("mlp_only_layers")
    only = [] if only is None else only
    if not isinstance(only, list) or not all(type(number) is int and number >= 0 for number in only):
        raise keys.refused("mlp_only_layers", "a list of layer numbers")
    dense = set(only)
    return Experts(
        names,
        num_experts,
        keys.size("num_experts_per_tok", high=num_experts),
        keys.size("moe_intermediate_size", default=intermediate_size),
        keys.flag("norm_topk_prob"),
        tuple(number for number in range(num_layers) if number in dense or (number + 1) % step),
    )


def has_gguf_experts(metadata: Mapping[str, Any], below: str) -> bool:
    """Whether GGUF metadata under "<architecture>." speak of experts."""
    count = metadata.get(below + "expert_count")
    return count is not None and (isinstance(count, bool) or count != 0)


def experts_from_gguf(names: ExpertNames, keys: Keys, below: str, intermediate_size: int) -> Experts:
    """The experts of GGUF metadata; which layers are dense is for the tensor table to say.

    Raises:
        CheckpointError: as experts_from_hf.
    """
    norm = below + "expert_weights_norm"
    num_experts = keys.size(below + "expert_count", high=MAX_EXPERTS)
    return Experts(
        names,
        num_experts,
        keys.size(below + "expert_used_count", high=num_experts),
        keys.size(below + "expert_feed_forward_length", default=intermediate_size),
        keys.raw.get(norm) is None or keys.flag(norm),
    )
