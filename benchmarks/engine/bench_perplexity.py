"""What does each way of keeping weights, or K and V, cost the embedded model?  python -m benchmarks.engine.bench_perplexity

Every token of perplexity.txt is predicted from those before it in a window of 512, through the engine's own forward pass. Beside
perplexity, the mean Kullback-Leibler divergence of next-token distributions from those of float32 (in nats): two models may be
surprised as often and not by the same words. On a CPU activations stay in the compute dtype whatever the weights are.
"""

import argparse
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.record import write
from rapid_llm.build import build_engine
from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.open import open_checkpoint
from rapid_llm.config import EngineConfig, pages_for
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.ledger import StartupLedger
from rapid_llm.step import Chunk, PageUpdate, SlotSetup, StepPlan

TEXT = Path(__file__).parent / "perplexity.txt"
WINDOW = 512
WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "gguf kept": {"gguf": "keep"},
    **{kind: {"quantize": kind} for kind in ("fp8", "int8", "nvfp4", "int4")},
    "fp8 KV cache": {"kv_dtype": "fp8_e4m3"},
}
"""Names of the ways, and the settings that ask for them; float32 comes first, since the others are held to it."""


def windows(num_tokens: int | None = None) -> tuple[list[list[int]], str]:
    """The text's ids, WINDOW at a time, and its hash; ``num_tokens`` stops there."""
    text = TEXT.read_bytes()
    ids = Tokenizer.from_checkpoint(open_checkpoint(find_embedded_model())).encode(text.decode(), add_special_tokens=True)
    ids = ids[:num_tokens]
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)], hashlib.sha256(text).hexdigest()


def open_engine(**options: str) -> Engine:
    """The embedded model on a CPU, kept in this way."""
    config = EngineConfig(device="cpu", max_model_len=WINDOW, max_batched_tokens=WINDOW, max_kv_tokens=WINDOW, **options)
    return build_engine(config, open_checkpoint(find_embedded_model()), StartupLedger())


@torch.inference_mode()
def logits_of(engine: Engine, ids: list[int]) -> torch.Tensor:
    """The logits after every token of one sequence, float32 [len(ids), vocab_size], from one prefill step."""
    worker = engine.worker
    pages = [PageUpdate(0, 0, tuple(range(pages_for(len(ids)))))]
    setup = SlotSetup(slot=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=-1)
    plan = StepPlan(prefills=[Chunk(0, 0, tuple(ids), samples=True)], slots=[setup], pages=pages)
    worker.sampler.setup(plan.slots)
    worker.builder.add_pages(plan.pages)
    batch = worker.builder.build(worker.builder.arrays(plan), worker.sampler.last_ids)
    every = torch.arange(len(ids), dtype=torch.int32, device=batch.sampled_rows.device)
    return worker.model(replace(batch, sampled_rows=every), worker.pool.layers).float()


def measure(texts: list[list[int]], ways: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Perplexity of each way, and its distance from the first one's predictions."""
    first: list[torch.Tensor] = []
    for way in ways:
        engine = open_engine(**WAYS[way])
        surprise = divergence = 0.0
        count = sum(len(ids) - 1 for ids in texts)
        for i, ids in enumerate(texts):
            logs = logits_of(engine, ids)[:-1].log_softmax(-1)
            surprise -= float(logs.gather(1, torch.tensor(ids[1:])[:, None]).double().sum())
            if way == ways[0]:
                first.append(logs)
            divergence += float((first[i].exp() * (first[i] - logs)).sum(1).double().sum())
        yield way, {"perplexity": math.exp(surprise / count), "kl": divergence / count, "tokens": count}


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="stop there; None is the whole text")
    options = parser.parse_args()
    os.environ.setdefault("RAPID_QUANTIZE_CACHE", "off")
    texts, digest = windows(options.tokens)
    found: dict[str, dict[str, float]] = {}
    print(f"{'way':<12} perplexity    ratio        KL")
    for way, each in measure(texts, list(WAYS)):
        found[way] = each
        ratio = each["perplexity"] / found["float32"]["perplexity"]
        print(f"{way:<12} {each['perplexity']:10.4f} {ratio:8.4f} {each['kl']:9.6f}", flush=True)
    results = {"text": TEXT.name, "sha256": digest, "window": WINDOW, "model": find_embedded_model().name, "ways": found}
    print(f"written to {write('perplexity_cpu', results)}")


if __name__ == "__main__":
    main()
