"""How fast does the embedded model decode on a CPU, next to transformers?  python -m benchmarks.engine.bench_offline

Both in float32, with the same threads, in one process, in turn; batch 1, greedy. Runs count only if both chose the same ids.
"""

import argparse
import time

import torch

from benchmarks.record import summary, write
from rapid_llm import LLM, SamplingParams
from rapid_llm.checkpoint.embedded import find_embedded_model

PROMPT = "Once upon a time, in a small village,"


def ours(llm: LLM, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Ids and decode tokens/s."""
    times, ids_chosen = [], []
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for output in llm.stream(ids, params):
        times.append(time.perf_counter())
        ids_chosen = output.outputs[0].token_ids
    return ids_chosen, (len(times) - 1) / (times[-1] - times[0])


@torch.inference_mode()
def transformers_loop(model, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    """The same by transformers' forward pass with its own cache: no generate(), whose bookkeeping would cost it time."""
    step = torch.tensor([ids])
    chosen, times, cache = [], [], None
    for _ in range(new_tokens):
        result = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = result.past_key_values, result.logits[:, -1:].argmax(-1)
        chosen.append(int(step))
        times.append(time.perf_counter())
    return chosen, (len(times) - 1) / (times[-1] - times[0])


def load_peer():
    """The same GGUF file in transformers, dequantised to float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = find_embedded_model()
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    )
    return model.eval()


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    llm, peer = LLM(device="cpu"), load_peer()
    ids = llm.tokenizer.encode(PROMPT, add_special_tokens=True)
    speeds: dict[str, list[float]] = {"rapid_llm": [], "transformers": []}
    for run in range(options.runs + 1):
        our_ids, our_speed = ours(llm, ids, options.new_tokens)
        peer_ids, peer_speed = transformers_loop(peer, ids, options.new_tokens)
        if our_ids != peer_ids:
            raise SystemExit(f"ids differ, so no speed is shown:\n{our_ids}\n{peer_ids}")
        if run:  # the first is the warm-up
            speeds["rapid_llm"].append(our_speed)
            speeds["transformers"].append(peer_speed)

    ratios = [our / peer for our, peer in zip(speeds["rapid_llm"], speeds["transformers"], strict=True)]
    weight_bytes = sum(slot.target.numel() * slot.target.element_size() for slot in llm._engine.worker.model.weights())
    floor = read_floor(weight_bytes)
    for name, values in speeds.items():
        s = summary(values)
        print(f"{name:<14} {s['median']:6.1f} tokens/s  ({s['min']:.1f} to {s['max']:.1f})")
    print(f"ratio          {summary(ratios)['median']:6.2f}           ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"floor          {floor:6.1f} tokens/s  (one read of {weight_bytes / 1e6:.0f} MB of weights a token)")
    results = {name: summary(values) for name, values in speeds.items()}
    results |= {
        "ratio": summary(ratios),
        "floor_tokens_per_s": floor,
        "threads": options.threads,
        "new_tokens": options.new_tokens,
    }
    print(f"written to {write('offline_cpu', results)}")


def read_floor(num_bytes: int) -> float:
    """Reads of ``num_bytes`` a second that this machine does: no decode step is faster, since it reads every weight."""
    buffer = torch.ones(num_bytes // 4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    return 1 / min(times)


if __name__ == "__main__":
    main()
