"""Tensors that hold every expert of a layer, as one tensor an expert: the bytes of each lie side by side in the stack.

GGUF files hold stacks [experts, n, k] of gate, up and down, newer Hugging Face exports may hold gate and up in one
[experts, 2n, k]. What they are cut into has the names that the architecture's usual folder gives single experts.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from rapid_llm.checkpoint.source import TensorInfo
from rapid_llm.errors import CheckpointError
from rapid_llm.models.experts import Experts

_STACK = re.compile(r"(model\.layers\.\d+)\.(\w+)\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
_ROUTER = re.compile(r"(model\.layers\.\d+)\.mlp\.gate\.weight")


def as_single_experts(tensors: Mapping[str, TensorInfo], experts: Experts | None) -> dict[str, TensorInfo]:
    """The tensor table with stacks cut up; what is no stack of that many experts stays, for the loader to judge.

    Raises:
        CheckpointError: an expert that stands in a stack and by itself.
    """
    if experts is None:
        return dict(tensors)
    table: dict[str, TensorInfo] = {}
    for info in tensors.values():
        for each in _singles(info, experts):
            if each.name in table:
                problem = f"{info.file}: tensor {info.name!r} holds what another one does"
                raise CheckpointError(problem, got=f"{each.name} twice", wanted="it once", change="remove one of the two")
            table[each.name] = each
    return table


def dense_layers(tensors: Collection[str], num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers that have one feed-forward."""
    return tuple(number for number in range(num_layers) if f"model.layers.{number}.mlp.gate_proj.weight" in tensors)


def _singles(info: TensorInfo, experts: Experts) -> Iterator[TensorInfo]:
    names = experts.names
    if router := _ROUTER.fullmatch(info.name):
        yield replace(info, name=f"{router[1]}.{names.block}.gate.weight")
        return
    stack = _STACK.fullmatch(info.name)
    parts = {
        "gate_up_proj": (names.gate, names.up),
        "gate_proj": (names.gate,),
        "up_proj": (names.up,),
        "down_proj": (names.down,),
    }[stack[3] if stack else "down_proj"]
    count, rows, *width = info.shape if len(info.shape) > 1 else (0, 0)
    if stack is None or stack[2] not in ("mlp", names.block) or count != experts.num_experts or rows % len(parts):
        yield info
        return
    shape, nbytes = (rows // len(parts), *width), info.nbytes // (count * len(parts))
    for number in range(count):
        for place, part in enumerate(parts):
            yield TensorInfo(
                f"{stack[1]}.{names.block}.experts.{number}.{part}.weight",
                shape,
                info.dtype,
                info.file,
                nbytes,
                info.offset + (number * len(parts) + place) * nbytes,
            )
