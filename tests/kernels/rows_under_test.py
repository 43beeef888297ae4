"""The rows that this machine can run, each as a callable with the op's signature, and the contract's sweep run over one.

Where TRITON_INTERPRET=1 and there is no GPU, these are the Triton rows too: on CPU tensors, in the interpreter, under the
sanitizer. Gluon has no interpreter, so its rows run where there are a GPU and a Triton that they serve.
"""

import os
import zlib
from dataclasses import dataclass

import pytest
import torch

from rapid_llm.kernels.device import current_device
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.dispatcher.dispatch import load_target
from rapid_llm.kernels.dispatcher.ranking import missing_packages
from rapid_llm.kernels.ops.interfaces import KernelSpec
from rapid_llm.kernels.verify.case import compare
from rapid_llm.kernels.verify.runner import case_maker

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
]


@dataclass(frozen=True)
class Row:
    """One row; calling it loads its target. An interpreted one runs under the sanitizer."""

    spec: KernelSpec

    def __call__(self, *args, **kwargs):
        if not _is_interpreted(self.spec):
            return load_target(self.spec)(*args, **kwargs)
        from rapid_llm.kernels.testing.sanitizer import sanitize

        with sanitize():
            return load_target(self.spec)(*args, **kwargs)


def each_row_of(op):
    """Parametrise a test over every row of ``op`` that this machine runs, under the op's own name."""
    rows = [pytest.param(Row(spec), id=spec.name) for spec in catalog().rows[op] if _runs_here(spec)]
    return pytest.mark.parametrize(op, rows)


def _runs_here(spec):
    return not missing_packages(spec) and (_is_interpreted(spec) or not spec.requires.unmet(current_device()))


def _is_interpreted(spec):
    return spec.name.startswith("triton.") and os.environ.get("TRITON_INTERPRET") == "1" and current_device().type == "cpu"


def to(device, tensor):
    """A copy on ``device`` with the strides of ``tensor``; Tensor.to gives a copy that skips elements dense ones."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def broken_cases(row, device):
    """What is wrong over the whole sweep of the row's contract, hard inputs included; empty when nothing is.

    An interpreted row has each size with plain inputs and with one kind of hard ones, in one of its dtypes each, by turns: all of
    them in each is what a GPU's evidence is made of.
    """
    contract, maker = catalog().contract(row.spec.op), case_maker(catalog(), row.spec.op)
    interpreted = _is_interpreted(row.spec)
    broken = []
    for turn, sizes in enumerate(contract.sweep):
        for number, hard in enumerate((None, *contract.hard)):
            if interpreted and number and turn % len(contract.hard) != number - 1:
                continue
            for place, dtype in enumerate(row.spec.dtypes):
                if interpreted and (turn + number + place) % len(row.spec.dtypes):
                    continue
                if row.spec.allows(sizes):
                    seed = zlib.crc32(f"{contract.op} {dtype} {sorted(sizes.items())} {hard}".encode())
                    generator = torch.Generator().manual_seed(seed)
                    case = maker(sizes, getattr(torch, dtype), device, generator, hard)
                    row(**case.arguments)
                    problems = [compare(check).problem for check in case.checks]
                    broken += [f"{dtype} {sizes} {case.id}: {problem}" for problem in problems if problem]
    return broken
