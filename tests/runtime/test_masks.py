"""Masks on the device: rows that have one keep what it allows, whatever was drawn before; steps without one launch nothing."""

import math

import torch

from rapid_llm.config import ResolvedConfig
from rapid_llm.kernels.device import current_device
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.sampler import Sampler
from rapid_llm.step import ALL_BANNED, NO_NUMBER, SlotSetup

VOCAB = 70


def make_sampler(slots=4):
    place = Placement(current_device("cpu"), torch.device("cpu"), torch.float32)
    sampler = Sampler(ResolvedConfig(64, slots, 64, 8), place, VOCAB, torch.zeros(slots + 1, dtype=torch.int32))
    sampler.setup([SlotSetup(slot, 0.0, 0, 1.0, 0.0, 0, -1) for slot in range(slots)])
    return sampler


def mask_of(*ids):
    return sum(1 << token for token in ids).to_bytes(12, "little")


def test_a_masked_row_is_drawn_anew_and_the_others_stay_as_they_are():
    sampler, logits = make_sampler(), torch.randn(3, VOCAB)
    drawn = logits.argmax(dim=1).int()
    sampled = sampler(logits, (2, 0, 3), [5, 5, 5], drawn, {0: mask_of(69), 3: mask_of(1, 33, 64)})
    likeliest = max((1, 33, 64), key=lambda token: logits[2, token])
    assert [sampled.tokens()[slot].token_id for slot in (2, 0, 3)] == [int(drawn[0]), 69, likeliest]
    assert sampler.last_ids.tolist() == [69, 0, int(drawn[0]), likeliest, 0]


def test_steps_without_a_mask_take_what_was_drawn_and_launch_nothing():
    sampler, drawn = make_sampler(), torch.tensor([4, 5], dtype=torch.int32)
    sampler._mask = None  # calling it would fail
    assert sampler(torch.randn(2, VOCAB), (0, 1), [5, 5], drawn).ids is drawn


def test_a_row_with_nothing_left_is_told_from_a_damaged_one():
    sampler, logits = make_sampler(), torch.randn(3, VOCAB)
    logits[0], logits[1, 9] = -math.inf, math.nan
    logits[0, 3] = 1.0
    sampled = sampler(logits, (0, 1, 2), [5, 5, 5], None, {0: mask_of(4), 1: mask_of(4), 2: mask_of(7)})
    assert [sampled.tokens()[slot].token_id for slot in (0, 1, 2)] == [ALL_BANNED, NO_NUMBER, 7]
