"""Fixtures of every test: the device, a fixed seed, torch.empty filled with NaN, and the interpreter that kernels run in."""

import functools
import importlib.util
import os

import pytest
import torch

_SEED = 20_261_129


@pytest.fixture(scope="session")
def device():
    """The device that ops are tested on: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_configure():
    """Where kernels run in Triton's interpreter, it computes with bf16 as a GPU does."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") and not torch.cuda.is_available():
        from rapid_llm.kernels.testing.number_types import install

        install()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(_SEED)


@pytest.fixture(autouse=True, scope="session")
def _empty_tensors_hold_nan():
    """Memory that nobody wrote reads as NaN, so that a result which depends on it cannot pass."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _filled_with_nan(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_weights_are_kept():
    """No test, nor a process it starts, reads or writes quantised weights of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAPID_QUANTIZE_CACHE", "off")
        yield


def _filled_with_nan(allocate):
    @functools.wraps(allocate)
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned
