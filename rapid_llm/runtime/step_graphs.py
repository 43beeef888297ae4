"""Steps padded to a few sizes, so that each size is one CUDA graph: a replay costs the host one launch in place of hundreds.

A graph holds no length of a sequence and no mix of decodes and prefill chunks: attention finds both on the device. What a step
is about goes to the device in one copy, in front of the replay. Padding writes nothing: its slots are -1, its sequences have no
keys, and what it samples goes to a row of the ids that is no sequence's.

Larger steps than the largest graph keep a GPU busy for longer than their launches take; they are padded too, so that every launch
that can ever be made is one of those that ``prepare`` has made.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from rapid_llm.config import PROMPT_LOGIT_ROWS, ResolvedConfig, mixed_sizes
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.runtime.batch_builder import StepArrays
from rapid_llm.runtime.recorded_steps import Model
from rapid_llm.runtime.sampler import Sampler
from rapid_llm.runtime.transfers import Ints, aligned, to_device

LARGEST_GRAPH = 2048
"""Tokens of the largest step that is captured."""
_READY = 8  # tokens of the largest graph that is captured before the engine is ready

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Turns a function that launches kernels on fixed tensors into one that launches them again."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that steps are padded to.

    Attributes:
        tokens, decodes, chunks, sampled: T, D, P and S of ForwardBatch.
    """

    tokens: int
    decodes: int
    chunks: int
    sampled: int

    def sections(self) -> dict[str, int]:
        """What a step sends to the device, in order, and how long each part is."""
        of_tokens = dict.fromkeys(("token_ids", "id_sources", "positions", "slot_mapping"), self.tokens)
        of_sequences = {"decode_rows": self.decodes, "decode_lens": self.decodes}
        of_chunks = {"chunk_rows": self.chunks, "chunk_lens": self.chunks, "chunk_bounds": self.chunks + 1}
        return (
            of_tokens
            | of_sequences
            | (of_chunks if self.chunks else {})
            | dict.fromkeys(("sampled_rows", "sampled_slots", "sampled_positions"), self.sampled)
        )


def decode_sizes(most: int) -> list[int]:
    """Sequences of the graphs for steps of nothing but decodes, up to ``most``: an eighth of padding at most from 8 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, most + 64, 64)]
    return [*(size for size in sizes if size < most), most]


def logit_sizes(most: int) -> list[int]:
    """Rows of logits of the steps that score prompt tokens, up to ``most`` or a little more: powers of two."""
    return [1 << exponent for exponent in range((most - 1).bit_length() + 1)]


class StepGraphs:
    """Runs steps by size.

    Args:
        model, pools: what runs a step, and the KV pool layer by layer.
        sampler: draws the ids; its ``last_ids`` lie in ``ids``.
        ids: int32 on the device: the id sampled last in each slot and in none, up to a 16-byte boundary, then room for one
            step's indices.
        page_table: the engine's.
        capture: makes a graph; None runs every step by its launches.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: Model,
        pools: Sequence[LayerPool],
        sampler: Sampler,
        ids: torch.Tensor,
        page_table: torch.Tensor,
        capture: Capture | None,
    ) -> None:
        self._model, self._pools, self._sampler, self._ids, self._page_table = model, pools, sampler, ids, page_table
        self._capture = capture
        self._num_slots = config.max_num_seqs
        self._first_input = aligned(self._num_slots + 1)
        buckets = list(step_buckets(config))
        self._decodes = {bucket.decodes: bucket for bucket in buckets if not bucket.chunks}
        self._mixed = {bucket.tokens: bucket for bucket in buckets if bucket.chunks}
        self._decode_sizes, self._mixed_sizes = sorted(self._decodes), sorted(self._mixed)
        self._logit_sizes = logit_sizes(PROMPT_LOGIT_ROWS + 2 * self._num_slots)  # each may have one scored and one sampled
        self._steps = {bucket: PaddedStep(bucket, self) for bucket in buckets}
        self.pending = [bucket for bucket in buckets if capture is not None and bucket.tokens <= LARGEST_GRAPH]

    def __call__(self, step: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, vocab_size] and ids [S] of the step's own sampled rows; valid until the next call."""
        padded = self._steps[self.bucket_of(step)]
        padded.fill(step)
        padded.run()
        wanted = len(step.sampled_rows)
        return padded.logits[:wanted], padded.sampled_ids[:wanted]

    def bucket_of(self, step: StepArrays) -> Bucket:
        """The smallest that holds the step."""
        tokens, chunks = len(step.token_ids), len(step.chunk_rows)
        if not chunks:
            return self._decodes[self._decode_sizes[bisect_left(self._decode_sizes, tokens)]]
        return self._mixed[self._mixed_sizes[bisect_left(self._mixed_sizes, tokens)]]

    def all_logits(self, step: StepArrays) -> torch.Tensor:
        """Logits of a step that scores prompt tokens, of as many rows as that may be; nothing is drawn. Run by launches."""
        return self._logits(self._filled(step), self._padded_rows(step))[: len(step.sampled_rows)]

    def hidden(self, step: StepArrays, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``model``, the part of it before the head, gives for a step's tokens, and padding; and the rows of ``all_logits``.

        Run by launches; nothing is drawn.
        """
        rows = self._padded_rows(step)
        return self._logits(self._filled(step), rows, model), rows

    def _filled(self, step: StepArrays) -> "PaddedStep":
        """A step on the device, of which nothing is drawn."""
        padded = self._steps[self.bucket_of(step)]
        padded.fill(replace(step, sampled_rows=_NONE, sampled_slots=_NONE, sampled_positions=_NONE))
        return padded

    def _padded_rows(self, step: StepArrays) -> torch.Tensor:
        wanted = len(step.sampled_rows)
        rows = np.zeros(self._logit_sizes[bisect_left(self._logit_sizes, wanted)], dtype=np.int32)
        rows[:wanted] = step.sampled_rows
        return to_device((rows,), self._ids.device)[0]

    def prepare(self, distinct: Model | None) -> None:
        """Make every launch once, on padding alone, and capture the graphs that the first requests will want.

        Steps with chunks come first: a request begins with one, and the kernel of their attention compiles for longest.

        Args:
            distinct: a model that launches all that the whole one does, but not once a layer; None is the whole one.
        """
        for bucket in (*self._mixed.values(), *self._decodes.values()):
            padded = self._steps[bucket]
            padded.fill(NOTHING)
            self.launch(padded, distinct)
        padded = self._steps[self._mixed[self._mixed_sizes[0]]]
        padded.fill(NOTHING)
        for size in self._logit_sizes:
            self._logits(padded, self._ids.new_zeros(size), distinct)
        self._sampler.prepare(decode_sizes(self._num_slots))
        while self.pending and self.pending[0].tokens <= _READY:
            self.capture_next()

    def capture_next(self) -> None:
        """Capture one of the graphs that are still to be made."""
        bucket = self.pending.pop(0)
        if self._capture is not None:
            padded = self._steps[bucket]
            padded.replay = self._capture(padded.launch)

    def launch(self, padded: "PaddedStep", model: Model | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step by its launches, of this model or another: logits and sampled ids of all of its rows."""
        views = padded.views
        logits = self._logits(padded, views["sampled_rows"], model)
        return logits, self._sampler.draw(logits, views["sampled_slots"], views["sampled_positions"])

    def _logits(self, padded: "PaddedStep", rows: torch.Tensor, model: Model | None = None) -> torch.Tensor:
        """Run the model on what was sent, for logits of some packed rows."""
        views, bucket, none = padded.views, padded.bucket, self._ids.new_empty(0)
        batch = ForwardBatch(
            token_ids=self._ids.index_select(0, views["id_sources"]),
            positions=views["positions"],
            slot_mapping=views["slot_mapping"],
            decode_rows=views["decode_rows"],
            decode_lens=views["decode_lens"],
            chunk_rows=views.get("chunk_rows", none),
            chunk_lens=views.get("chunk_lens", none),
            chunk_bounds=views.get("chunk_bounds", none),
            longest_chunk=bucket.tokens if bucket.chunks else 0,
            page_table=self._page_table,
            sampled_rows=rows,
        )
        return (model or self._model)(batch, self._pools)

    @property
    def inputs(self) -> torch.Tensor:
        """Where a step's indices go, behind the ids."""
        return self._ids[self._first_input :]

    def id_sources(self, step: StepArrays, bucket: Bucket) -> Ints:
        """Where in the ids each token's own is: what was sampled last in its slot, or what the host has sent."""
        sources = np.arange(self._first_input, self._first_input + bucket.tokens, dtype=np.int32)
        sources[step.held] = step.held_slots
        return sources

    @property
    def nobodys_slot(self) -> int:
        """The row of the ids that no sequence has; the page allocator and the scheduler hand out those before it."""
        return self._num_slots


class PaddedStep:
    """One bucket's tensors.

    Attributes:
        views: on the device, by section.
        logits, sampled_ids: what the last run left.
        replay: runs the captured graph; None while there is none.
    """

    def __init__(self, bucket: Bucket, graphs: StepGraphs) -> None:
        self.bucket, self._graphs = bucket, graphs
        self.replay: Replay | None = None
        self.views: dict[str, torch.Tensor] = {}
        self._places: dict[str, slice] = {}
        start = 0
        for name, size in bucket.sections().items():
            self._places[name] = slice(start, start + size)
            self.views[name] = graphs.inputs[start : start + size]
            start += aligned(size)
        self._size = start
        self.logits = self.sampled_ids = graphs.inputs.new_empty(0)

    def fill(self, step: StepArrays) -> None:
        """Send a step's indices to the device, with padding behind each."""
        pinned = torch.empty(self._size, dtype=torch.int32, pin_memory=self._graphs.inputs.is_cuda)
        host = pinned.numpy()
        padding = {
            "slot_mapping": -1,
            "chunk_bounds": step.chunk_bounds[-1],
            "sampled_slots": self._graphs.nobodys_slot,
        }
        for name, place in self._places.items():
            values = self._graphs.id_sources(step, self.bucket) if name == "id_sources" else getattr(step, name)
            section = host[place]
            section[: len(values)] = values
            section[len(values) :] = padding.get(name, 0)
        self._graphs.inputs[: self._size].copy_(pinned, non_blocking=True)

    def run(self) -> None:
        """Replay the graph, or launch what it will hold."""
        if self.replay is not None:
            self.replay()
        else:
            self.launch()

    def launch(self) -> None:
        """Run by launches."""
        self.logits, self.sampled_ids = self._graphs.launch(self)


def step_buckets(config: ResolvedConfig) -> Iterator[Bucket]:
    """Every size that a step of this engine is padded to, in the order in which they are wanted."""
    most = config.max_num_seqs
    if config.deterministic:  # decodes are chunks of one token
        for size in sorted({*decode_sizes(most), *mixed_sizes(config.max_batched_tokens)}):
            yield Bucket(size, 0, min(size, most), min(size, most))
        return
    for size in decode_sizes(most):
        yield Bucket(size, size, 0, size)
    for size in mixed_sizes(config.max_batched_tokens):
        yield Bucket(size, min(size, most), min(size, most), min(size, most))


def room_for_steps(config: ResolvedConfig) -> int:
    """Elements of the ids: one for each slot and for none, and behind them the indices of the largest step."""
    indices = max(sum(map(aligned, bucket.sections().values())) for bucket in step_buckets(config))
    return aligned(config.max_num_seqs + 1) + indices


def cuda_graphs(device: torch.device) -> Capture:
    """Capture as CUDA graphs that share one pool of memory: they never run at the same time."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(launch: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            launch()
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        replay: Replay = graph.replay
        return replay

    return capture


_NONE = np.zeros(0, dtype=np.int32)
_EMPTY: dict[str, Any] = {field.name: np.zeros(int(field.name == "chunk_bounds"), np.int32) for field in fields(StepArrays)}
NOTHING = StepArrays(**_EMPTY | {"scores": False})
"""A step that is padding alone."""
