"""StepPlan in, sampled ids out, on one device. Submitting returns at once on a GPU; on a CPU the step has run by then."""

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder
from rapid_llm.runtime.graph_runner import GraphRunner, Model
from rapid_llm.runtime.kv_pool import KVPool
from rapid_llm.runtime.prompt_scorer import PromptScorer, ScoredPrompts
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
        self.forward = GraphRunner(model, pool.layers, place.recorder, enabled=on_cpu)
        self.builder = BatchBuilder(config, place)
        self.sampler = Sampler(config, place, vocab_size)
        self.scorer = PromptScorer(config, place, vocab_size)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> "SubmittedStep":
        """Run one step; see StepPlan for what it holds."""
        self.sampler.setup(plan.slots)
        self.scorer.setup(plan.slots)
        batch = self.builder.build(plan, self.sampler.last_ids)
        logits = self.forward(batch)
        scored = self.scorer(logits, plan)
        if scored is not None:
            logits = logits[scored.sampled_rows]
        sampled = [(chunk.slot, chunk.start + chunk.length) for chunk in plan.chunks if chunk.samples]
        if not sampled:
            return SubmittedStep(None, scored)
        slots, positions = zip(*sampled, strict=True)
        return SubmittedStep(self.sampler(logits, slots, positions), scored)


class SubmittedStep:
    """A step on its way. On a GPU its ids travel to pinned memory behind it."""

    def __init__(self, sampled: SampledStep | None, scored: ScoredPrompts | None) -> None:
        self.sampled, self.scored = sampled, scored
        self.event: torch.cuda.Event | None = None
        if any(part is not None and part.on_gpu for part in (sampled, scored)):
            self.sampled = None if sampled is None else sampled.to_host()
            self.scored = None if scored is None else scored.to_host()
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def result(self) -> StepResult:
        """Wait for the ids of this step, and of this step only."""
        if self.event is not None:
            self.event.synchronize()
        tokens = {} if self.sampled is None else self.sampled.tokens()
        return StepResult(tokens, {} if self.scored is None else self.scored.tokens())
