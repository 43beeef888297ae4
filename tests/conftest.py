"""Fixtures of every test: the device, a fixed seed, and torch.empty filled with NaN."""

import functools

import pytest
import torch

_SEED = 20_261_129


@pytest.fixture(scope="session")
def device():
    """The device that ops are tested on: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


def _filled_with_nan(allocate):
    @functools.wraps(allocate)
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned
