"""StepPlan in, sampled ids out, on one device. Submitting returns at once on a GPU; on a CPU the step has run by then."""

import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.forward_batch import ForwardBatch, LayerPool
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder, StepArrays
from rapid_llm.runtime.first_requests import first_requests
from rapid_llm.runtime.kv_pool import KVPool
from rapid_llm.runtime.pooler import PooledPrompts, Pooler
from rapid_llm.runtime.prompt_scorer import PromptScorer, ScoredPrompts
from rapid_llm.runtime.recorded_steps import Model, RecordedSteps
from rapid_llm.runtime.sampler import SampledStep, Sampler
from rapid_llm.runtime.step_graphs import StepGraphs, cuda_graphs, room_for_steps
from rapid_llm.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

_BESIDE_GRAPHS = (
    "adjust_logits",
    "mask_logits",
    "top_logprobs",
    "update_kv_index",
)  # launched for themselves, where a step needs them


class Network(Protocol):
    """A model, its two parts too.

    Attributes:
        head: hidden states [T, hidden_size] and rows [S] int32 to logits [S, vocab_size].
    """

    head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, batch: ForwardBatch, pools: Sequence[LayerPool]) -> torch.Tensor:
        """Logits [S, vocab_size] of the sampled rows."""

    def hidden(self, batch: ForwardBatch, pools: Sequence[LayerPool]) -> torch.Tensor:
        """Hidden states [T, hidden_size]."""


class Worker:
    """Owns the model, the KV pool and the device's per-slot tables.

    Attributes:
        depth: steps that may be in flight while the next one is planned.
        num_compiles: Triton kernels that were compiled or loaded since ``prepare`` was done.
        graphs: runs steps padded and captured; None runs them as long as they are, by ``forward`` (a CPU).
    """

    def __init__(self, config: ResolvedConfig, place: Placement, model: Network, pool: KVPool, vocab_size: int) -> None:
        self.model, self.pool = model, pool
        on_cpu = place.device.type == "cpu"
        self.depth = 0 if on_cpu else 1
        self.num_compiles = 0
        self._num_slots, self._vocab_size = config.max_num_seqs, vocab_size
        self._clock = HostClock if on_cpu else DeviceClock
        self.forward = RecordedSteps(model, pool.layers, place.recorder)
        self.builder = BatchBuilder(config, place)
        slots = config.max_num_seqs + 1  # the last is nobody's: what padding samples goes there
        ids = torch.zeros(slots if on_cpu else room_for_steps(config), dtype=torch.int32, device=place.device)
        self.sampler = Sampler(config, place, vocab_size, ids[:slots])
        self.scorer = PromptScorer(config, place, vocab_size)
        self.pooler = Pooler()
        self.graphs: StepGraphs | None = None
        if not on_cpu:
            waiting = [op for op in place.ops_in_plain_torch() if op not in _BESIDE_GRAPHS]
            if waiting and config.cuda_graphs:
                ops = ", ".join(waiting)
                logger.warning(
                    f"no CUDA graphs: {ops} in plain torch may wait for the host (`rapid-llm kernels explain OP` says why)"
                )
            capture = cuda_graphs(place.device) if config.cuda_graphs and not waiting else None
            table = self.builder.page_table
            self.graphs = StepGraphs(config, model, pool.layers, self.sampler, ids, table, capture)

    @torch.inference_mode()
    def prepare(self, distinct: Model | None = None) -> None:
        """Make every launch that a step can need once, so that none compiles or loads anything later.

        Args:
            distinct: the model without layers that launch what others do; None makes the launches of all.
        """
        if self.graphs is not None:
            self.builder.prepare()
            self.graphs.prepare(distinct)
            if self.builder.device.type == "cuda":  # and not a rehearsal, whose tensors hold nothing
                for plan in first_requests(self._num_slots, self._vocab_size):
                    self._begin(plan).result()
            torch.cuda.empty_cache()  # what launches took, graphs that are still to be captured take again
            _tell_of_loads(self._count_compile)

    def _count_compile(self, *_: object) -> None:
        self.num_compiles += 1

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> "SubmittedStep":
        """Run one step; see StepPlan for what it holds."""
        submitted = self._begin(plan)
        if self.graphs is not None and self.graphs.pending:
            self.graphs.capture_next()  # while the device is busy with this step
        return submitted

    def _begin(self, plan: StepPlan) -> "SubmittedStep":
        clock = self._clock()
        self.sampler.setup(plan.slots)
        self.scorer.setup(plan.slots)
        self.pooler.setup(plan.slots)
        self.builder.add_pages(plan.pages)
        return self._run(plan, clock)

    def _run(self, plan: StepPlan, clock: "HostClock | DeviceClock") -> "SubmittedStep":
        step, drawn, scored, pooled = self.builder.arrays(plan), None, None, None
        if self.pooler.wants(plan):
            hidden, rows = self._hidden(step)
            pooled = self.pooler(hidden, plan)
            logits = self.model.head(hidden, rows)[: len(step.sampled_rows)] if len(step.sampled_rows) else hidden
        elif self.graphs is None:
            logits = self.forward(self.builder.build(step, self.sampler.last_ids))
        elif step.scores:
            logits = self.graphs.all_logits(step)
        else:
            logits, drawn = self.graphs(step)
        if step.scores:
            scored = self.scorer(logits, plan)
            logits = logits[scored.sampled_rows]
        slots = step.sampled_slots.tolist()
        masks = {chunk.slot: chunk.mask for chunk in plan.chunks if chunk.mask}
        sampled = self.sampler(logits, slots, step.sampled_positions.tolist(), drawn, masks) if slots else None
        return SubmittedStep(sampled, scored, pooled, clock)

    def _hidden(self, step: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a step, run by its launches, and the rows to take logits of, padded on a GPU."""
        if self.graphs is not None:
            return self.graphs.hidden(step, self.model.hidden)
        batch = self.builder.build(step, self.sampler.last_ids)
        return self.model.hidden(batch, self.pool.layers), batch.sampled_rows


def _tell_of_loads(hear: Callable[..., None]) -> None:
    """Call ``hear`` whenever Triton loads a kernel, which it does after each compilation too; nothing is heard without Triton."""
    if importlib.util.find_spec("triton") is not None:
        import triton

        triton.knobs.runtime.kernel_load_start_hook.add(hear)


class SubmittedStep:
    """A step on its way. On a GPU its ids travel to pinned memory behind it."""

    def __init__(
        self,
        sampled: SampledStep | None,
        scored: ScoredPrompts | None,
        pooled: PooledPrompts | None,
        clock: "HostClock | DeviceClock",
    ) -> None:
        self.sampled, self.scored, self.pooled, self.clock = sampled, scored, pooled, clock
        if isinstance(clock, DeviceClock):
            self.sampled = None if sampled is None else sampled.to_host()
            self.scored = None if scored is None else scored.to_host()
            self.pooled = None if pooled is None else pooled.to_host()
        clock.stop()

    def result(self) -> StepResult:
        """Wait for this step, and for this step only."""
        seconds = self.clock.seconds()
        tokens = {} if self.sampled is None else self.sampled.tokens()
        scored = {} if self.scored is None else self.scored.tokens()
        return StepResult(tokens, scored, {} if self.pooled is None else self.pooled.vectors(), seconds)


class HostClock:
    """Times a step that has run when it is submitted. Starts when it is made."""

    def __init__(self) -> None:
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> None:
        """The step has run."""
        self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """What it took."""
        return self._stopped - self._started


class DeviceClock:
    """Times a step on the device, from when the one before it was done or this one was begun. Starts when it is made."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._events[0].record()

    def stop(self) -> None:
        """All of the step is submitted."""
        self._events[1].record()

    def seconds(self) -> float:
        """Wait for the step; what it took."""
        started, stopped = self._events
        stopped.synchronize()
        return float(started.elapsed_time(stopped)) / 1000
