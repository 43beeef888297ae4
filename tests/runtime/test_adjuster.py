"""What the device keeps for penalties and bans equals what all tokens of each sequence say, whatever slots come and go."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.config import ResolvedConfig
from rapid_llm.kernels.device import current_device
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.adjuster import Adjuster
from rapid_llm.step import FOREVER, Adjust, Edit, SlotSetup

VOCAB, SLOTS = 11, 5
IDS = st.integers(0, VOCAB - 1)
EDITS = st.lists(
    st.builds(
        Edit,
        IDS,
        st.sampled_from([-math.inf, 5.0, -2.5]),
        st.sampled_from([3, 6, FOREVER, FOREVER]),
        st.lists(IDS, max_size=3).map(tuple),
    ),
    max_size=6,
    # one finite edit a token, as the rules make them
    unique_by=lambda edit: (edit.token_id, edit.value != -math.inf) if edit.value != -math.inf else id(edit),
)
ADJUSTS = st.one_of(
    st.none(),
    st.tuples(st.sampled_from([1.0, 2.0, 0.5]), st.sampled_from([0.0, 1.5]), st.sampled_from([0.0, -0.5]), EDITS),
)


def make_adjuster(slots=SLOTS):
    place = Placement(current_device("cpu"), torch.device("cpu"), torch.float32)
    return Adjuster(ResolvedConfig(64, slots, 64, 8), place, VOCAB)


def expected_row(logits, ids, prompt_len, adjust):
    row = logits.tolist()
    for token in range(VOCAB):
        times = ids[prompt_len:].count(token)
        if token in ids:
            row[token] = row[token] / adjust.repetition_penalty if row[token] > 0 else row[token] * adjust.repetition_penalty
        row[token] -= adjust.frequency_penalty * times + adjust.presence_penalty * (times > 0)
    for edit in adjust.edits:
        if len(ids) < edit.until and tuple(ids[len(ids) - len(edit.prefix) :]) == edit.prefix:
            row[edit.token_id] += edit.value
    return row


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_logits_are_adjusted_by_all_tokens_of_each_sequence(data):
    adjuster, running = make_adjuster(), {}
    for _ in range(data.draw(st.integers(1, 12))):
        for slot in data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=2), label="slots that change hands"):
            prompt = data.draw(st.lists(IDS, min_size=1, max_size=4), label="prompt")
            said = data.draw(st.lists(IDS, max_size=4), label="said before a preemption")
            values = data.draw(ADJUSTS, label="adjust")
            adjust = values and Adjust(*values[:3], tuple(values[3]), len(prompt))
            adjust = adjust if adjust and (adjust.edits or adjust.penalises) else None
            running[slot] = ([*prompt, *said], len(prompt), adjust)
            ids = tuple(running[slot][0]) if adjust else ()
            adjuster.setup([SlotSetup(slot, 0.0, 0, 1.0, 0.0, 0, -1, adjust=adjust, token_ids=ids)])
        slots = tuple(data.draw(st.lists(st.sampled_from(sorted(running)), unique=True)) if running else ())
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB)
        out = adjuster(logits, slots, [len(running[slot][0]) for slot in slots])
        for row, slot in enumerate(slots):
            ids, prompt_len, adjust = running[slot]
            wanted = logits[row].tolist() if adjust is None else expected_row(logits[row], ids, prompt_len, adjust)
            got = logits[row] if out is None else out[row]
            assert got.tolist() == pytest.approx(wanted, abs=1e-5)
        sampled = data.draw(st.lists(IDS, min_size=len(slots), max_size=len(slots)), label="sampled")
        adjuster.note(slots, torch.tensor(sampled, dtype=torch.int32))
        for slot, token in zip(slots, sampled, strict=True):
            running[slot][0].append(token)


def plain(slot):
    return SlotSetup(slot, 0.0, 0, 1.0, 0.0, 0, -1)


def penalised(slot, ids=(1,)):
    return SlotSetup(slot, 0.0, 0, 1.0, 0.0, 0, -1, adjust=Adjust(2.0, 0.0, 0.0, (), 1), token_ids=tuple(ids))


def test_steps_without_adjustments_make_nothing_and_call_nothing():
    adjuster = make_adjuster()
    adjuster._kernel = None  # calling it would fail
    adjuster.setup([plain(0), penalised(1)])
    assert adjuster(torch.zeros(1, VOCAB), (0,), [3]) is None
    adjuster.note((0,), torch.tensor([4], dtype=torch.int32))
    adjuster.setup([plain(1)])
    assert adjuster(torch.zeros(2, VOCAB), (0, 1), [3, 3]) is None


def test_a_sequence_past_the_end_of_its_bans_costs_nothing_any_more():
    adjuster = make_adjuster()
    ban = Adjust(1.0, 0.0, 0.0, (Edit(4, -math.inf, 6),), 1)
    adjuster.setup([SlotSetup(0, 0.0, 0, 1.0, 0.0, 0, -1, adjust=ban, token_ids=(1,))])
    assert adjuster(torch.zeros(1, VOCAB), (0,), [5])[0, 4] == -math.inf
    assert adjuster(torch.zeros(1, VOCAB), (0,), [6]) is None


def test_the_table_of_counts_grows_with_those_who_need_it_and_is_reused():
    adjuster = make_adjuster(slots=6)
    assert adjuster._counts.shape[0] == 0
    for slot, rows in enumerate([4, 4, 4, 4, 6, 6]):
        adjuster.setup([penalised(slot)])
        assert adjuster._counts.shape[0] == rows
    for turn in range(20):
        adjuster.setup([penalised(turn % 6, ids=(turn % VOCAB,))])
        [row] = adjuster(torch.ones(1, VOCAB), (turn % 6,), [1]).tolist()
        assert [token for token, value in enumerate(row) if value != 1.0] == [turn % VOCAB]
    assert adjuster._counts.shape[0] == 6


def test_a_row_that_found_no_number_is_not_counted():
    adjuster = make_adjuster()
    adjuster.setup([penalised(0), penalised(1)])
    adjuster(torch.ones(2, VOCAB), (0, 1), [1, 1])
    adjuster.note((0, 1), torch.tensor([-1, 5], dtype=torch.int32))
    out = adjuster(torch.ones(2, VOCAB), (0, 1), [2, 2])
    assert [[token for token, value in enumerate(row) if value != 1.0] for row in out.tolist()] == [[1], [1, 5]]
