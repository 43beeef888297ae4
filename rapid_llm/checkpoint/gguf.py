"""GGUF files of the llama family: tensors by their Hugging Face names, dequantised, with rows in Hugging Face order."""

import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid_llm.checkpoint import name_map
from rapid_llm.checkpoint.expert_stacks import as_single_experts, dense_layers
from rapid_llm.checkpoint.file_reader import TensorFiles
from rapid_llm.checkpoint.generation import GenerationDefaults
from rapid_llm.checkpoint.ggml_types import BLOCK_TYPES, GGML_TYPE_NAMES, BlockType, dequantise
from rapid_llm.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from rapid_llm.checkpoint.source import TensorInfo, TokenizerMetadata, TokenizerSource
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.registry import architecture
from rapid_llm.models.rope_scaling import RopeScaling

_BY_DTYPE = {kind.dtype: kind for kind in BLOCK_TYPES.values()}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}


class GgufCheckpoint:
    """One GGUF file. See CheckpointSource.

    Raises:
        CheckpointError: a file that is cut or corrupt, or holds an architecture, tensor or tensor type that is not served.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        self._files = TensorFiles()
        reader = self._files.open(file)
        header = read_gguf_header(reader)
        if header.metadata.get("split.count", 0) not in (0, 1):
            got = f"one of {header.metadata['split.count']} parts"
            raise CheckpointError(
                f"{file} is a part of a split file", got=got, wanted="one file", change="merge it: gguf-split --merge"
            )
        config = ModelConfig.from_gguf(header.metadata, file)
        self.tensors = _tensor_table(header, file, reader.size)
        divisors = self.tensors.pop(name_map.ROPE_DIVISORS, None)
        if divisors is not None:
            config = replace(config, rope_scaling=self._divided(config, divisors))
        self.config = _settle_by_tensors(config, self.tensors)
        self.tensors = as_single_experts(self.tensors, self.config.experts)
        if architecture(config.architecture).gguf_pairs:
            self.tensors = {name: replace(info, is_reordered=_is_permuted(name)) for name, info in self.tensors.items()}
        self.generation = GenerationDefaults()
        self.tokenizer_source: TokenizerSource = TokenizerMetadata(header.metadata, file)

    def read(self, name: str) -> NDArray[Any]:
        """Values of a tensor, dequantised to float32; F16 stays float16, BF16 comes as raw uint16 bits. See CheckpointSource."""
        info = self.tensors[name]
        return self.decode(name, self._files.raw(info), info.shape)

    def kv_scales(self) -> dict[str, NDArray[Any]]:
        """None: no such file has any. See CheckpointSource."""
        return {}

    def fill(self, file: Path, offset: int, buffer: NDArray[np.uint8]) -> None:
        """Bytes of the file. See CheckpointSource."""
        self._files.fill(file, offset, buffer)

    def decode(self, name: str, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        """Blocks as float32 in Hugging Face's order of rows. See CheckpointSource."""
        info = self.tensors[name]
        kind = _BY_DTYPE[info.dtype]
        rows = self.rows(name, raw, shape[0])
        if kind.dequantise is None:
            values = rows.reshape(-1).view(_NUMPY_DTYPES[info.dtype]).reshape(shape)
            return values if values.flags.aligned else values.copy()
        return dequantise(rows.reshape(-1, kind.block_bytes), kind).reshape(shape)

    def rows(self, name: str, raw: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        """Bytes by row, in Hugging Face's order. See CheckpointSource."""
        rows = raw.reshape(count, -1)
        return _unpermuted(rows, name, self.config) if self.tensors[name].is_reordered else rows

    def _divided(self, config: ModelConfig, info: TensorInfo) -> RopeScaling:
        """The rotary frequencies' scaling by the divisors in a tensor: llama3's, as the converter writes it."""
        wanted = f"{config.head_dim // 2} float32 numbers above 0, and no other scaling"
        values = self._files.raw(info).tobytes()
        numbers = array("f", values) if info.dtype == "float32" else array("f")
        is_sound = len(numbers) == config.head_dim // 2 and all(0 < number < math.inf for number in numbers)
        if not is_sound or config.rope_scaling is not None:
            got = f"{info.dtype} {list(info.shape)}"
            if config.rope_scaling is not None:
                got += f", and scaling {config.rope_scaling.kind!r} in the metadata"
            problem = f"{self.path}: tensor 'rope_freqs.weight' cannot be used"
            raise CheckpointError(problem, got=got, wanted=wanted, change="convert the file again")
        return RopeScaling("factors", divisors=tuple(numbers))

    def close(self) -> None:
        """Give back file handle and window."""
        self._files.close()


def _is_permuted(name: str) -> bool:
    """Whether the converter reorders the rows of a tensor where it reorders any."""
    return name.split(".")[-2] in ("q_proj", "k_proj")


def _unpermuted(rows: NDArray[np.uint8], name: str, config: ModelConfig) -> NDArray[np.uint8]:
    """Rows of a q or k projection, or its bias, back in Hugging Face order.

    ggml rotates, in what it calls llama, neighbouring pairs (2i, 2i + 1), Hugging Face the halves (i, i + head_dim / 2), so the
    converter interleaves the halves of each head. Whole rows move, so this works on quantised bytes.
    """
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    if len(rows) % (2 * heads):  # not this model's: the loader will say so
        return rows
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _settle_by_tensors(config: ModelConfig, tensors: dict[str, TensorInfo]) -> ModelConfig:
    """What GGUF metadata leaves to the tensor table: tied embeddings, biases, and which layers of a sparse model are dense."""
    experts = config.experts
    return replace(
        config,
        experts=None if experts is None else replace(experts, dense_layers=dense_layers(tensors, config.num_layers)),
        tie_word_embeddings="lm_head.weight" not in tensors,
        qkv_bias=any(name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias")) for name in tensors),
        o_bias=any(name.endswith(".o_proj.bias") for name in tensors),
        mlp_bias=any(name.endswith("_proj.bias") and ".mlp." in name for name in tensors),
    )


def _tensor_table(header: GgufHeader, file: Path, file_size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    end = header.data_start
    for stored in sorted(header.tensors, key=lambda tensor: tensor.offset):
        info = _tensor_info(stored, file, header.data_start)
        if info.name in tensors:
            raise CheckpointError(f"{file}: tensor {stored.name!r} stands twice", change="convert the file again")
        if info.offset < end:
            problem, wanted = f"{file}: tensor {stored.name!r} overlaps another", f"data from byte {end:,} on"
            raise CheckpointError(problem, got=f"from {info.offset:,}", wanted=wanted, change="fetch the file again")
        end = info.offset + info.nbytes
        if end > file_size:
            got, wanted = f"{file_size:,} bytes", f"{end:,} for tensor {stored.name!r}"
            raise CheckpointError(f"{file} is truncated", got=got, wanted=wanted, change="fetch the file again")
        tensors[info.name] = info
    return tensors


def _tensor_info(stored: GgufTensor, file: Path, data_start: int) -> TensorInfo:
    kind = _block_type(stored, file)
    if len(stored.shape) < 2 and kind.dequantise is not None:
        problem, wanted = f"{file}: tensor {stored.name!r} is a quantised vector", "vectors of F32, F16 or BF16"
        raise CheckpointError(problem, got=kind.dtype, wanted=wanted, change="convert the model again")
    if stored.shape[-1] % kind.block_elements:
        problem, wanted = f"{file}: tensor {stored.name!r} has broken blocks", f"rows of a multiple of {kind.block_elements}"
        raise CheckpointError(problem, got=f"rows of {stored.shape[-1]}", wanted=wanted, change="fetch the file again")
    num_elements = 1
    for size in stored.shape:
        num_elements *= size
    name = name_map.from_gguf(stored.name, file)
    nbytes = num_elements // kind.block_elements * kind.block_bytes
    return TensorInfo(name, stored.shape, kind.dtype, file, nbytes, data_start + stored.offset)


def _block_type(stored: GgufTensor, file: Path) -> BlockType:
    type_name = GGML_TYPE_NAMES.get(stored.type_id, f"number {stored.type_id}")
    if type_name not in BLOCK_TYPES:
        problem, wanted = f"{file}: tensor {stored.name!r} is of a type that is not supported", " | ".join(BLOCK_TYPES)
        raise CheckpointError(problem, got=type_name, wanted=wanted, change="convert the model to one of those")
    return BLOCK_TYPES[type_name]
