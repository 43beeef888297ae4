"""A few hundred requests of every kind, some left, refused or preempted: all are answered, and nothing is left behind."""

import asyncio
import random
from dataclasses import fields

import pytest

from rapid_llm import SamplingParams
from rapid_llm.engine.request_pages import RequestPages
from tests.soak import one_process, two_processes
from tests.soak.traffic import values
from tests.tiny_model import save_checkpoint, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("tiny")))


@pytest.mark.case("I1")
@pytest.mark.case("I16")
def test_traffic_of_every_kind_loses_and_leaves_nothing_in_a_process_of_the_engines_own(folder):
    ends = asyncio.run(two_processes.run(folder, 250, seed=1))
    assert {manner.__name__ for manner in two_processes.MANNERS} == set(ends)


@pytest.mark.case("I1")
@pytest.mark.case("I14")
def test_traffic_of_every_kind_loses_and_leaves_nothing_in_one_process(folder):
    ends = one_process.run(folder, 250, seed=1)
    kinds = {"answered", "left", "never read", "refused", "all banned", "canary", "preemptions", "cached tokens"}
    assert {kind for kind, count in ends.items() if count} == kinds


def test_every_sampling_value_is_in_the_traffic():
    draw, plain = random.Random(0), SamplingParams()
    drawn = [values(draw) for _ in range(500)]
    for field in fields(SamplingParams):
        assert any(getattr(one, field.name) != getattr(plain, field.name) for one in drawn), field.name


def test_a_page_that_is_not_given_back_is_told(folder, monkeypatch):
    release, forgotten = RequestPages.release, []

    def forgetful(self, request):
        if request.pages and not forgotten:
            forgotten.append(request.pages[0])
            request.pages = request.pages[1:]
        release(self, request)

    monkeypatch.setattr(RequestPages, "release", forgetful)
    with pytest.raises(AssertionError, match="1 pages are left behind"):
        one_process.run(folder, 40, seed=1)


def test_a_request_that_is_kept_is_told(folder, monkeypatch):
    kept = []

    def hoarding(self, request):
        kept.append(request)
        take_back(self, request)

    take_back = RequestPages.release
    monkeypatch.setattr(RequestPages, "release", hoarding)
    with pytest.raises(AssertionError, match=r"objects are left behind: .'Request'"):
        one_process.run(folder, 40, seed=1)
