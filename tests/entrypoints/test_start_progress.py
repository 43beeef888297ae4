"""How far a start is, as a terminal and as a log show it."""

import os
import pty
import re
import subprocess
import sys

import pytest

from rapid_llm.entrypoints.start_progress import StartProgress, amount


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def progress(monkeypatch, *, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    said, clock = [], Clock()
    return StartProgress(said.append, clock), said, clock


def test_a_terminal_shows_a_bar_that_vanishes(monkeypatch, capsys):
    shown, said, clock = progress(monkeypatch, is_terminal=True)
    shown.note("load weights", 0, 0)
    clock.now += 2
    shown.note("weights", 1_000_000_000, 4_000_000_000)
    assert capsys.readouterr().err == "\r\033[Kweights [######..................] 1,000 of 4,000 MB, 0.50 GB/s"
    shown.note("weights", 4_000_000_000, 4_000_000_000)
    assert capsys.readouterr().err.endswith("4,000 of 4,000 MB, 2.00 GB/s\r\033[K")
    shown.clear()
    assert (capsys.readouterr().err, said) == ("", [])


def test_elsewhere_only_a_start_that_takes_long_says_so_every_five_seconds(monkeypatch, capsys):
    shown, said, clock = progress(monkeypatch, is_terminal=False)
    for seconds in range(1, 12):
        clock.now = 100.0 + seconds
        shown.note("weights", seconds * 100_000_000, 2_000_000_000, words="loading weights", seconds=seconds)
    assert said == [f"loading weights {n * 100:,} of 2,000 MB, 0.10 GB/s" for n in (6, 11)]
    assert capsys.readouterr().err == ""


def test_a_phase_counts_in_its_own_unit_and_kernels_have_no_gigabytes(monkeypatch, capsys):
    shown, _, clock = progress(monkeypatch, is_terminal=True)
    clock.now += 1
    shown.note("kernels", 13, 52)
    assert capsys.readouterr().err == "\r\033[Kkernels [######..................] 13 of 52 kernels"
    assert amount("weights", 3_000_000, 4_000_000) == "3 of 4 MB"


@pytest.mark.parametrize("flags", [(), ("--no-progress",)], ids=["shown", "not-shown"])
def test_serve_draws_what_its_engine_process_tells(tmp_path, flags):
    from tests.tiny_model import save_checkpoint, tiny_llama

    folder = str(save_checkpoint(tiny_llama(), tmp_path / "tiny"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rapid_llm", "serve", folder, "--port", "0", "--max-kv-tokens", "64", *flags]
    with subprocess.Popen(command, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        text = ""
        while '"event": "ready' not in text and (piece := os.read(ours, 4096)):
            text += piece.decode()
        process.terminate()
    os.close(ours)
    drawn = re.findall(r"weights \[#{24}\] \d+ of \d+ MB, \d+\.\d\d GB/s\r\033\[K", text)
    assert bool(drawn) == (not flags)
