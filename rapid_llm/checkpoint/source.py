"""What every kind of checkpoint gives: tensors by Hugging Face name, model config, sampling defaults, tokenizer parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rapid_llm.checkpoint.generation import GenerationDefaults
from rapid_llm.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STORED_CODES = ("int8", "uint8", "int32", "int64", "float8_e4m3fn")
"""Dtypes of tensors that are no values by themselves: codes, packed ones and indices of a quantised checkpoint."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is.

    Attributes:
        name: Hugging Face name ("model.layers.0.self_attn.q_proj.weight"), whatever the file calls it.
        shape: sizes, outermost first.
        dtype: "float32", "float16", "bfloat16" or one of STORED_CODES; for a quantised GGUF tensor its ggml type, such as
            "Q4_K" or "Q8_0".
        file: the file that holds it.
        nbytes: bytes it takes in the file.
        offset: byte of the file where it begins.
        is_reordered: whether its rows stand in another order in the file, so that they come right only all together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int
    offset: int
    is_reordered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the bytes in the file are the values as they stand."""
        return self.dtype in ("float32", "float16", "bfloat16", *STORED_CODES) and not self.is_reordered


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer as a folder holds it: tokenizer.json and, where they exist, tokenizer_config.json and the chat template.

    Attributes:
        folder: where the files are.
        bos_token_id: the id config.json names, for a tokenizer that names no begin-of-text token itself.
    """

    folder: Path
    bos_token_id: int | None = None


@dataclass(frozen=True)
class TokenizerMetadata:
    """A tokenizer as a GGUF file holds it: the ``tokenizer.*`` keys of its metadata."""

    metadata: Mapping[str, Any]
    file: Path


TokenizerSource = TokenizerFolder | TokenizerMetadata


class CheckpointSource(Protocol):
    """An open checkpoint. Its headers are read and checked; tensor data is read on demand, best in the order of ``tensors``.

    Attributes:
        path: what was opened: a folder or a .gguf file.
        config: the model's sizes.
        tensors: every tensor by name, in file order.
        generation: sampling values and end-of-text ids that the checkpoint recommends.
        tokenizer_source: what ``engine/tokenizer.py`` builds a tokenizer from.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    generation: GenerationDefaults
    tokenizer_source: TokenizerSource

    def read(self, name: str) -> "NDArray[Any]":
        """Values of a tensor, in its shape; bfloat16 and float8 come as the uint16 and uint8 arrays of their raw bits.

        Quantised GGUF tensors come dequantised, as float32. The array may be a view of the read-ahead window: it stays valid,
        and keeps that window (32 MiB) alive as long as it is held. Safe to call from several threads.

        Raises:
            CheckpointError: the file was cut or replaced since it was opened.
        """

    def kv_scales(self) -> "dict[str, NDArray[Any]]":
        """Scales of a KV cache in few bits by the names that the file gives them, as float32; none of them is in ``tensors``.

        Raises:
            CheckpointError: one that is no float; as ``read``.
        """

    def fill(self, file: Path, offset: int, buffer: "NDArray[np.uint8]") -> None:
        """Fill ``buffer`` with the bytes of one of the checkpoint's files from ``offset`` on. Safe to call from several threads.

        Raises:
            CheckpointError: as ``read``.
        """

    def decode(self, name: str, raw: "NDArray[np.uint8]", shape: tuple[int, ...]) -> "NDArray[Any]":
        """Values, as ``read`` gives them, of the bytes of a tensor or of some of its rows, which make up ``shape``."""

    def rows(self, name: str, raw: "NDArray[np.uint8]", count: int) -> "NDArray[np.uint8]":
        """The bytes of a tensor, or of some of its rows, as [count, bytes of a row], in the order that ``decode`` gives rows."""

    def close(self) -> None:
        """Give back the file handles and the read-ahead window. Arrays that were read stay valid."""
