"""Safetensors folders: config.json beside one model.safetensors, or shards and their index.

The header is read here (eight bytes of length, then JSON) and not by the safetensors package, because the package maps files into
memory and that is the slow way to read a whole checkpoint. Format: https://github.com/huggingface/safetensors, Apache-2.0.
"""

import math
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rapid_llm.checkpoint.expert_stacks import as_single_experts
from rapid_llm.checkpoint.file_reader import FileReader, TensorFiles
from rapid_llm.checkpoint.generation import GenerationDefaults
from rapid_llm.checkpoint.json_file import MAX_JSON_BYTES, parse_json_object, read_json_object
from rapid_llm.checkpoint.name_map import is_kv_scale, is_unneeded
from rapid_llm.checkpoint.source import TensorInfo, TokenizerFolder, TokenizerSource
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says how weights are quantised."""

DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("uint8", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
}
"""Dtypes that are read, by safetensors name: their names here and bytes. Powers of two (E8M0) are read as their bytes."""

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
_HEADER_AHEAD = 64 << 10  # most headers of a shard come with the read of their length


class SafetensorsCheckpoint:
    """A folder in Hugging Face layout. See CheckpointSource.

    Raises:
        CheckpointError: a file that is missing, cut, inconsistent with its header or index, or of a dtype or model not served.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = ModelConfig.from_hf(_with_quantization(folder), folder / "config.json")
        self.generation = _generation_defaults(folder)
        self.tokenizer_source: TokenizerSource = TokenizerFolder(folder, self.config.bos_token_id)
        self._files = TensorFiles()
        held = _tensor_table(folder, self._files)
        self._kv_scales = [info for name, info in held.items() if is_kv_scale(name)]
        weights = {name: info for name, info in held.items() if not is_unneeded(name)}
        self.tensors = as_single_experts(weights, self.config.experts)

    def read(self, name: str) -> NDArray[Any]:
        """Values of a tensor; bfloat16 as the raw bits in uint16. See CheckpointSource."""
        info = self.tensors[name]
        return self.decode(name, self._files.raw(info), info.shape)

    def kv_scales(self) -> dict[str, NDArray[Any]]:
        """Scales of a KV cache. See CheckpointSource."""
        return {info.name: self._floats(info) for info in self._kv_scales}

    def _floats(self, info: TensorInfo) -> NDArray[Any]:
        raw = self._files.raw(info)
        if info.dtype == "bfloat16":
            values = (raw.view("<u2").astype("<u4") << 16).view("<f4")
        elif info.dtype in ("float32", "float16"):
            values = raw.view(_NUMPY_DTYPES[info.dtype]).astype("<f4")
        else:
            wanted, change = "a float", "fetch the checkpoint again"
            raise CheckpointError(f"{self.path}: {info.name} is no scale", got=info.dtype, wanted=wanted, change=change)
        return values.reshape(info.shape)

    def fill(self, file: Path, offset: int, buffer: NDArray[np.uint8]) -> None:
        """Bytes of a shard. See CheckpointSource."""
        self._files.fill(file, offset, buffer)

    def decode(self, name: str, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        """Bytes as numbers. See CheckpointSource."""
        values = raw.view(_NUMPY_DTYPES[self.tensors[name].dtype]).reshape(shape)
        return values if values.flags.aligned else values.copy()

    def rows(self, name: str, raw: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        """Bytes by row. See CheckpointSource."""
        return raw.reshape(count, -1)

    def close(self) -> None:
        """Give back file handles and window."""
        self._files.close()


def _with_quantization(folder: Path) -> dict[str, Any]:
    """config.json, with the quantisation that stands in a file of its own where config.json says nothing of it."""
    config, file = read_json_object(folder / "config.json"), folder / QUANTIZATION_FILE
    if not file.exists():
        return config
    found, other = config.get("quantization_config"), {"quant_method": "modelopt", **read_json_object(file)}
    if found is None and config.get("compression_config") is None:
        return config | {"quantization_config": other}
    names = [_algorithm(each) for each in (found, other)]
    if names[0] != names[1]:
        got, change = f"{names[0]!r} and {names[1]!r}", f"remove {QUANTIZATION_FILE} or correct it"
        raise CheckpointError(f"{folder}: config.json and {QUANTIZATION_FILE} differ", got=got, wanted="one way", change=change)
    return config


def _algorithm(config: Any) -> Any:
    """What ModelOpt's config names, at the top or under "quantization"; another format's own name."""
    if not isinstance(config, dict) or config.get("quant_method") != "modelopt":
        return config.get("quant_method") if isinstance(config, dict) else None
    nested = config.get("quantization")
    return (nested if isinstance(nested, dict) else config).get("quant_algo")


def _generation_defaults(folder: Path) -> GenerationDefaults:
    file = folder / "generation_config.json"
    return GenerationDefaults.from_hf(read_json_object(file), file) if file.exists() else GenerationDefaults()


def _tensor_table(folder: Path, files: TensorFiles) -> dict[str, TensorInfo]:
    """Every tensor of every shard, by name, in file order."""
    weight_map = _weight_map(folder)
    shards = sorted(set(weight_map.values())) if weight_map else [_single_file(folder)]
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        change = "fetch the missing files"
        raise CheckpointError(f"{folder / INDEX_FILE} names files that are not there", got=", ".join(missing), change=change)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for info in read_header(files.open(folder / shard)):
            if info.name in tensors:
                got = f"it in {tensors[info.name].file.name} and {shard}"
                raise CheckpointError(f"{folder}: tensor {info.name!r} stands twice", got=got, change="remove one of the files")
            tensors[info.name] = info
    _check_weight_map(weight_map, tensors, folder / INDEX_FILE)
    return tensors


def _single_file(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if SINGLE_FILE in found:
        return SINGLE_FILE
    if len(found) != 1:
        got = ", ".join(found[:8]) or "no .safetensors file"
        raise CheckpointError(f"{folder}: no telling which weights to load", got=got, wanted=INDEX_FILE, change="add the index")
    return found[0]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, by the index; empty where the folder needs none."""
    file = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists() or not file.exists():
        return {}
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map", got=type(weight_map).__name__, wanted="tensor names to file names")
    for name, shard in weight_map.items():
        # A plain name: an index may not reach out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            wanted = "the name of a .safetensors file beside the index"
            raise CheckpointError(
                f"{file}: tensor {name!r} has no usable file", got=repr(shard), wanted=wanted, change="correct it"
            )
    return weight_map


def _check_weight_map(weight_map: dict[str, str], tensors: dict[str, TensorInfo], index: Path) -> None:
    absent = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].file.name != shard]
    if absent:
        got = f"{len(absent)} not there: {', '.join(absent[:8])}"
        raise CheckpointError(f"{index} names tensors that its files do not hold", got=got, change="fetch index and files again")


def read_header(reader: FileReader) -> list[TensorInfo]:
    """The tensors of one file, by offset.

    Raises:
        CheckpointError: a header that is cut, no JSON, or that does not account for every byte of the file exactly once.
    """
    path = reader.path
    if reader.size < 8:
        raise CheckpointError(
            f"{path} is truncated", got=f"{reader.size} bytes", wanted="a safetensors file", change="fetch it again"
        )
    length = int.from_bytes(reader.view(0, 8, ahead=_HEADER_AHEAD).tobytes(), "little")
    if length > min(reader.size - 8, MAX_JSON_BYTES):
        got, wanted = f"a header of {length:,} bytes", f"at most {min(reader.size - 8, MAX_JSON_BYTES):,}"
        raise CheckpointError(f"{path} is truncated or no safetensors file", got=got, wanted=wanted, change="fetch it again")
    header = parse_json_object(reader.view(8, length, ahead=length).tobytes(), f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = sorted(
        (_tensor_info(name, entry, 8 + length, path) for name, entry in header.items()), key=lambda info: info.offset
    )
    end = 8 + length
    for info in tensors:
        if info.offset != end:
            got, wanted = f"data from byte {info.offset:,} on", f"from {end:,}, where the one before ends"
            raise CheckpointError(
                f"{path}: tensor {info.name!r} overlaps or leaves a gap", got=got, wanted=wanted, change="fetch it again"
            )
        end += info.nbytes
    if end != reader.size:
        problem = f"{path} is truncated or has bytes that no tensor owns"
        raise CheckpointError(problem, got=f"{reader.size:,} bytes", wanted=f"{end:,}", change="fetch it again")
    return tensors


def _tensor_info(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    def refused(what: str, got: Any, wanted: str, change: str = "fetch the file again") -> CheckpointError:
        return CheckpointError(
            f"{path}: {what} of tensor {name!r} cannot be used", got=repr(got)[:120], wanted=wanted, change=change
        )

    if not isinstance(entry, dict):
        raise refused("the entry", entry, "an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refused("the dtype", dtype, " | ".join(DTYPES), "convert the checkpoint to one of those")
    if not _is_sizes(shape):
        raise refused("the shape", shape, "a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise refused("the data_offsets", offsets, "[begin, end]")
    torch_name, itemsize = DTYPES[dtype]
    nbytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise refused("the data_offsets", offsets, f"{nbytes:,} bytes, by its shape {shape!r}"[:120])
    return TensorInfo(name, tuple(shape), torch_name, path, nbytes, data_start + offsets[0])


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 8 and all(type(size) is int and 0 <= size < 2**63 for size in value)
