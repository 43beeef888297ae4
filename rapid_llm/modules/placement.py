"""Where a model's tensors live and which kernels its layers bind: device, dtype, and dispatch for both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rapid_llm.kernels.device import DeviceInfo
from rapid_llm.kernels.dispatcher.dispatch import choose, choose_by_size, choose_without_libraries, load_prepare, load_target
from rapid_llm.kernels.dispatcher.ranking import Question
from rapid_llm.kernels.ops.interfaces import KernelSpec, Sizes
from rapid_llm.modules.batch_invariance import batch_invariant
from rapid_llm.quantization.formats import Formats, Plain

Call = Callable[[], Any]


@dataclass
class Recorder:
    """Notes the kernel calls of one step, in order, while ``calls`` is a list; ``shared`` is what they keep for each other."""

    calls: list[Call] | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @contextmanager
    def record(self) -> Iterator[list[Call]]:
        """Collect calls that repeat, on the same tensors, every kernel call made inside."""
        calls: list[Call] = []
        self.calls, self.shared = calls, {}
        try:
            yield calls
        finally:
            self.calls, self.shared = None, {}


class BoundKernel:
    """The row that serves an op for one layer: called like the row's own function."""

    __slots__ = ("_function", "_prepare", "_recorder")

    def __init__(self, function: Callable[..., Any], prepare: Callable[..., tuple[Call, ...]] | None, recorder: Recorder) -> None:
        self._function, self._prepare, self._recorder = function, prepare, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the row; while a step is recorded, also note how to run it again."""
        result = self._function(*args, **kwargs)
        calls = self._recorder.calls
        if calls is not None:
            again = None if self._prepare is None else self._prepare(self._recorder.shared, *args, **kwargs)
            calls.extend(again or (partial(self._function, *args, **kwargs),))
        return result


class BoundBySize:
    """The rows that serve an op for one layer, each for calls up to a number of tokens."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: tuple[tuple[int, BoundKernel], ...]) -> None:
        self._pieces = pieces

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the row of this number of tokens, rows of the first tensor."""
        count = first.shape[0]
        for most, kernel in self._pieces:
            if count <= most:
                return kernel(first, *args, **kwargs)
        return self._pieces[-1][1](first, *args, **kwargs)


@dataclass(frozen=True)
class Placement:
    """Passed to every layer's constructor.

    Attributes:
        info: what the device can do.
        device: where tensors go.
        dtype: of weights and activations.
        formats: how each linear layer keeps its weight.
        recorder: sees every kernel call of the layers built with this placement.
        questions: what those layers asked of dispatch, each once.
        kv_dtype: of the KV pool; None is that of activations.
        deterministic: give a token the same bits whatever it is computed beside; see batch_invariance.py.
    """

    info: DeviceInfo
    device: torch.device
    dtype: torch.dtype
    formats: Formats = field(default_factory=Plain)
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    questions: list[Question] = field(default_factory=list, compare=False)
    kv_dtype: torch.dtype | None = None
    deterministic: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as kernel rows name it."""
        return str(self.dtype).removeprefix("torch.")

    def kernel(self, op: str, **sizes: int) -> BoundKernel | BoundBySize:
        """What serves ``op`` here, kept by the layer: one row, or the fastest for each number of tokens where they differ."""
        question = Question(op, self.info, self.dtype_name, sizes, batch_invariant=self._leaves_libraries_out)
        if question not in self.questions:  # every layer asks the same
            self.questions.append(question)
        if self.deterministic:
            row = self._choose(op, sizes)
            function = batch_invariant(row, load_target(row), on_cpu=self.device.type == "cpu")
            return BoundKernel(function, load_prepare(row) if function is load_target(row) else None, self.recorder)
        pieces = choose_by_size(op, device=self.info, dtype=self.dtype_name, **sizes)
        bound = tuple((most, BoundKernel(load_target(row), load_prepare(row), self.recorder)) for most, row in pieces)
        return bound[0][1] if len(bound) == 1 else BoundBySize(bound)

    def ops_in_plain_torch(self) -> list[str]:
        """The ops that a row in plain torch serves in some layer built with this placement."""
        asked = {question.op: question for question in self.questions}
        return [op for op, each in asked.items() if self._choose(op, each.sizes).fallback]

    def is_native(self, op: str, **sizes: int) -> bool:
        """Whether a row other than plain torch serves ``op`` here."""
        return not self._choose(op, sizes).fallback

    def _choose(self, op: str, sizes: Sizes) -> KernelSpec:
        chosen_by = choose_without_libraries if self._leaves_libraries_out else choose
        return chosen_by(op, device=self.info, dtype=self.dtype_name, **sizes)

    @property
    def _leaves_libraries_out(self) -> bool:
        """On a CPU, where all products are a library's, every call is of one row instead."""
        return self.deterministic and self.device.type != "cpu"

    def weight(self, *shape: int, transposed: bool = False) -> torch.Tensor:
        """A parameter of ``shape``, NaN until it is loaded.

        ``transposed`` stores a matrix column by column on a CPU, where one token's product then reads it at nearly the
        speed of a plain read; the other order is slower there, by how much depends on the processor.
        """
        if transposed and self.device.type == "cpu":
            return self.weight(*reversed(shape)).t()
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
