"""Compile-only tests: a run of their own, without TRITON_INTERPRET, once per Triton version (see the Makefile)."""

import importlib.util
import os

import pytest

from rapid_llm.kernels.device import device_info

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]  # there is no compiler, or it would not be called


def pytest_addoption(parser):
    parser.addoption("--devices", default="a100", help="names of the device table to compile for, with commas in between")
    parser.addoption("--every", type=int, default=1, help="compile every so-manieth point of a sweep, other ones for each device")


def pytest_generate_tests(metafunc):
    if "simulated" in metafunc.fixturenames:
        devices = [device_info(name) for name in metafunc.config.getoption("--devices", "a100").split(",")]
        metafunc.parametrize("simulated", devices, ids=lambda device: device.name)


@pytest.fixture
def every(request):
    """Of how many points of a sweep one is compiled for a device."""
    return request.config.getoption("--every", 1)


@pytest.fixture
def skip_unless_its_turn(request, simulated, every):
    """Called with a number: skips for all but one of the devices where sweeps are shared out; another number, another device."""

    def skip(number):
        devices = request.config.getoption("--devices", "a100").split(",")
        if every > 1 and (devices.index(simulated.name) + number) % len(devices):
            pytest.skip("compiled for another device")

    return skip


@pytest.fixture(autouse=True)
def _stores_of_its_own(tmp_path, monkeypatch):
    """Tiles come from the shipped store and the heuristics, not from what was tuned on this machine."""
    monkeypatch.setenv("RAPID_DATA_DIR", str(tmp_path / "data"))
