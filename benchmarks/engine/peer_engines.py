"""Engines that are measured beside this one, each in a process of its own, which waits for its turn once it has loaded.

    python -m benchmarks.engine.peer_engines vllm FOLDER --batch 256

A line of standard input is a batch; a line of standard output is what was measured at it, as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.engine.decode_rate import Prompts, decode_rate

PEERS_SHARE = 0.3  # of the device's memory, for each of two
CONTEXT = 2048


class PeerEngine:
    """A peer that loads when it is made, and measures when it is asked.

    RuntimeError with the end of what it wrote, where it has ended by itself.
    """

    def __init__(self, name: str, folder: Path, batch: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engine.peer_engines", name, str(folder), "--batch", str(batch)]
        self.name, self._log = name, folder / f"{name}.log"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log.open("w"), text=True
        )

    def ready(self) -> dict[str, Any]:
        """Waits until the peer is loaded; its version and the seconds it took."""
        return self._answer()

    def measure(self, batch: int) -> dict[str, Any]:
        """Tokens/s and ms a step of the peer at a batch."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError(f"{self.name} has no input")
        stdin.write(f"{batch}\n")
        stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Ends the peer and gives its memory back."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith("PEER "):  # whatever else a peer prints goes by
                return dict(json.loads(line[5:]))
        raise RuntimeError(f"{self.name} ended: {self._log.read_text()[-3000:]}")


def load_vllm(folder: str, batch: int) -> tuple[str, Callable[[Prompts, int], object]]:
    """vLLM in one process, its own defaults for the rest."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm

    llm = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=max(batch, 64),
        gpu_memory_utilization=PEERS_SHARE,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, new: int) -> object:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return str(vllm.__version__), generate


def load_transformers(folder: str, batch: int) -> tuple[str, Callable[[Prompts, int], object]]:
    """transformers' generate on the device."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, new: int) -> object:
        ids = torch.tensor(prompts, device="cuda")
        return model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0).cpu()

    return str(transformers.__version__), generate


LOADERS = {"vllm": load_vllm, "transformers": load_transformers}


def main() -> None:
    """Load, say so, and measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(LOADERS))
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, required=True, help="the largest")
    options = parser.parse_args()
    start = time.perf_counter()
    version, generate = LOADERS[options.name](options.folder, options.batch)
    generate([[7] * 16], 1)
    _say(sys.stdout, {"version": version, "seconds to a first token": time.perf_counter() - start})
    for line in sys.stdin:
        _say(sys.stdout, decode_rate(lambda prompts, new: _seconds(generate, prompts, new), int(line)))


def _seconds(generate: Callable[[Prompts, int], object], prompts: Sequence[Sequence[int]], new: int) -> float:
    start = time.perf_counter()
    generate(prompts, new)
    return time.perf_counter() - start


def _say(out: TextIO, what: dict[str, Any]) -> None:
    out.write(f"PEER {json.dumps(what)}\n")
    out.flush()


if __name__ == "__main__":
    main()
