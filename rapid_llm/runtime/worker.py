"""StepPlan in, sampled ids out, on one device. Submitting returns at once on a GPU; on a CPU the step has run by then."""

import time

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder
from rapid_llm.runtime.graph_runner import GraphRunner, Model
from rapid_llm.runtime.kv_pool import KVPool
from rapid_llm.runtime.sampler import SampledStep, Sampler
from rapid_llm.step import StepPlan, StepResult


class Worker:
    """Owns the model, the KV pool and the device's per-slot tables.

    Attributes:
        depth: steps that may be in flight while the next one is planned.
    """

    def __init__(self, config: ResolvedConfig, place: Placement, model: Model, pool: KVPool, vocab_size: int) -> None:
        self.model, self.pool = model, pool
        on_cpu = place.device.type == "cpu"
        self.depth = 0 if on_cpu else 1
        self._clock = HostClock if on_cpu else DeviceClock
        self.forward = GraphRunner(model, pool.layers, place.recorder, enabled=on_cpu)
        self.builder = BatchBuilder(config, place)
        self.sampler = Sampler(config, place, vocab_size)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> "SubmittedStep":
        """Run one step; see StepPlan for what it holds."""
        clock = self._clock()
        self.sampler.setup(plan.slots)
        batch = self.builder.build(plan, self.sampler.last_ids)
        logits = self.forward(batch)
        sampled = [(chunk.slot, chunk.start + chunk.length) for chunk in plan.chunks if chunk.samples]
        if not sampled:
            return SubmittedStep(None, clock)
        slots, positions = zip(*sampled, strict=True)
        return SubmittedStep(self.sampler(logits, slots, positions), clock)


class SubmittedStep:
    """A step on its way. On a GPU its ids travel to pinned memory behind it."""

    def __init__(self, sampled: SampledStep | None, clock: "HostClock | DeviceClock") -> None:
        self.sampled, self.clock = sampled, clock
        if sampled is not None and sampled.ids.is_cuda:
            self.sampled = sampled.to_host()
        clock.stop()

    def result(self) -> StepResult:
        """Wait for the ids of this step, and of this step only."""
        seconds = self.clock.seconds()
        return StepResult({} if self.sampled is None else self.sampled.tokens(), seconds)


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
