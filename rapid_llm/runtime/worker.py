"""StepPlan in, sampled ids out, on one device. Submitting returns at once on a GPU; on a CPU the step has run by then."""

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder, StepArrays, to_device
from rapid_llm.runtime.kv_pool import KVPool
from rapid_llm.runtime.recorded_steps import Model, RecordedSteps
from rapid_llm.runtime.sampler import SampledStep, Sampler
from rapid_llm.runtime.step_graphs import StepGraphs, cuda_graphs, room_for_steps
from rapid_llm.step import StepPlan, StepResult


class Worker:
    """Owns the model, the KV pool and the device's per-slot tables.

    Attributes:
        depth: steps that may be in flight while the next one is planned.
        graphs: runs steps padded and captured; None runs them as long as they are (a CPU).
    """

    def __init__(self, config: ResolvedConfig, place: Placement, model: Model, pool: KVPool, vocab_size: int) -> None:
        self.model, self.pool, self.device = model, pool, place.device
        on_cpu = place.device.type == "cpu"
        self.depth = 0 if on_cpu else 1
        self.forward = RecordedSteps(model, pool.layers, place.recorder, enabled=on_cpu)
        self.builder = BatchBuilder(config, place)
        slots = config.max_num_seqs + 1  # the last is nobody's: what padding samples goes there
        ids = torch.zeros(slots + (0 if on_cpu else room_for_steps(config)), dtype=torch.int32, device=place.device)
        self.sampler = Sampler(config, place, vocab_size, ids[:slots])
        self.graphs: StepGraphs | None = None
        if not on_cpu:
            capture = cuda_graphs(place.device) if config.cuda_graphs else None
            table = self.builder.page_table
            self.graphs = StepGraphs(config, model, pool.layers, self.sampler, ids, table, capture)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Make every launch that a step can need once, so that none compiles or loads anything later."""
        if self.graphs is not None:
            self.graphs.prepare()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> "SubmittedStep":
        """Run one step; see StepPlan for what it holds."""
        self.sampler.setup(plan.slots)
        self.builder.add_pages(plan.pages)
        step = self.builder.arrays(plan)
        logits, ids = self._run(step)
        submitted = SubmittedStep(self.sampler.report(logits, ids, step.sampled_slots.tolist()))
        if self.graphs is not None and self.graphs.pending:
            self.graphs.capture_next()  # while the device is busy with this step
        return submitted

    def _run(self, step: StepArrays) -> tuple[torch.Tensor, torch.Tensor]:
        if self.graphs is not None:
            return self.graphs(step)
        logits = self.forward(self.builder.build(step, self.sampler.last_ids))
        return logits, self.sampler.draw(logits, *to_device((step.sampled_slots, step.sampled_positions), self.device))


class SubmittedStep:
    """A step on its way. On a GPU its ids travel to pinned memory behind it."""

    def __init__(self, sampled: SampledStep) -> None:
        self.sampled = sampled
        self.event: torch.cuda.Event | None = None
        if sampled.ids.is_cuda:
            self.sampled = sampled.to_host()
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def result(self) -> StepResult:
        """Wait for the ids of this step, and of this step only."""
        if self.event is not None:
            self.event.synchronize()
        return StepResult(self.sampled.tokens())
