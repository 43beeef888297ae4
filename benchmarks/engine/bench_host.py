"""What does the host spend on a decode step, which a GPU must take longer than?  python -m benchmarks.engine.bench_host

Engine, scheduler, index tensors and sampler as they are, around a device that has its logits and ids ready: no kernel runs, so
what is left is the host's own work, text apart (AsyncLLM does that in another process).
"""

import time
from dataclasses import dataclass

import torch

from benchmarks.record import summary, write
from rapid_llm.config import ResolvedConfig
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.request import Request, TokenRules
from rapid_llm.kernels.device import device_info
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder
from rapid_llm.runtime.sampler import Sampler
from rapid_llm.runtime.step_graphs import PaddedStep, StepGraphs, room_for_steps
from rapid_llm.step import StepPlan, StepResult

BATCHES, VOCABULARY, STEPS, RUNS = (1, 8, 64, 256), 1000, 50, 7


class ReadyAtOnce(StepGraphs):
    """Steps whose results are there already."""

    def launch(self, padded: PaddedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids that nobody computed."""
        rows = padded.bucket.sampled
        return self._model[:rows], self._ids.new_full((rows,), 5)


class Worker:
    """A worker without a model."""

    depth = 1

    def __init__(self, config: ResolvedConfig) -> None:
        place, slots = Placement(device_info("cpu"), torch.device("cpu"), torch.float32), config.max_num_seqs + 1
        ids = torch.zeros(slots + room_for_steps(config), dtype=torch.int32)
        self.sampler, self.builder = Sampler(config, place, VOCABULARY, ids[:slots]), BatchBuilder(config, place)
        logits = torch.zeros(config.max_num_seqs, VOCABULARY)
        self.graphs = ReadyAtOnce(config, logits, [], self.sampler, ids, self.builder.page_table, None)

    def submit(self, plan: StepPlan) -> "Done":
        """As the real one."""
        self.sampler.setup(plan.slots)
        self.builder.add_pages(plan.pages)
        step = self.builder.arrays(plan)
        logits, ids = self.graphs(step)
        slots = step.sampled_slots.tolist()
        tokens = self.sampler(logits, slots, step.sampled_positions.tolist(), ids).tokens() if slots else {}
        return Done(StepResult(tokens, seconds=0.005))


@dataclass
class Done:
    """A step that is over."""

    value: StepResult

    def result(self) -> StepResult:
        """What it brought."""
        return self.value


def measure(batch: int) -> dict[str, float]:
    """Milliseconds a step."""
    engine = Engine(ResolvedConfig(4096, batch, 2048, 64 * batch), Worker(ResolvedConfig(4096, batch, 2048, 64 * batch)))
    for number in range(batch):
        engine.add(Request(str(number), [(7 * number + i) % 900 + 10 for i in range(64)], TokenRules(STEPS * (RUNS + 2))))
    while any(request.num_to_compute != 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        times.append(1e3 * (time.perf_counter() - start) / STEPS)
    return summary(times)


def main() -> None:
    """Measure, print, record."""
    results = {f"batch {batch}, ms a step": measure(batch) for batch in BATCHES}
    for key, value in results.items():
        print(f"{key:<22} {value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f})")
    print(f"written to {write('host_cpu', results)}")


if __name__ == "__main__":
    main()
