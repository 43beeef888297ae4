"""The Triton code that Inductor makes of an op's plain-torch row, to be read and never copied.

    python -m benchmarks.kernels.show_inductor OP [--dtype bfloat16]

At the op's default sizes. It shows what a compiler fuses by itself, and so what a kernel of our own has to beat.
"""

import argparse

import torch

from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.measure.tuner import fallback_row
from rapid_llm.kernels.measure.workloads import workload


def main() -> None:
    """Compile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(catalog().contracts))
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Inductor makes Triton code for a GPU, and torch sees none here")
    from torch._inductor.utils import run_and_get_code

    call = workload(options.op, catalog().contract(options.op).defaults, options.dtype, max_sets=1)
    function = torch.compile(load_target(fallback_row(options.op)), dynamic=False)
    _, parts = run_and_get_code(function, **call.sets[0])
    print("\n".join(parts) or "nothing was compiled: the row's steps depend on values, which ends each graph")


if __name__ == "__main__":
    main()
