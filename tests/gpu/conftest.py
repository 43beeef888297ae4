"""These tests run where there is a GPU and are left out everywhere else: `make test` says so by not counting them."""

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def device():
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _free_memory():
    """Large tensors of one test are given back before the next."""
    yield
    torch.cuda.empty_cache()
