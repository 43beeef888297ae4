"""A plan becomes exactly the index tensors it describes."""

from dataclasses import fields

import pytest
import torch

from rapid_llm.config import PAGE_SIZE, ResolvedConfig
from rapid_llm.kernels.device import device_info
from rapid_llm.modules.placement import Placement
from rapid_llm.runtime.batch_builder import BatchBuilder
from rapid_llm.step import Chunk, PageUpdate, StepPlan

CONFIG = ResolvedConfig(max_model_len=4 * PAGE_SIZE, max_num_seqs=4, max_batched_tokens=64, num_pages=16)


@pytest.fixture
def builder():
    return BatchBuilder(CONFIG, Placement(device_info("cpu"), torch.device("cpu"), torch.float32))


def build(builder, plan, last_ids):
    builder.add_pages(plan.pages)
    return builder.build(builder.arrays(plan), last_ids)


def test_decodes_come_first_and_every_tensor_follows_the_packed_order(builder):
    last_ids = torch.tensor([70, 71, 72, 73], dtype=torch.int32)
    plan = StepPlan(
        decodes=[Chunk(2, 17, (), samples=True), Chunk(0, 3, (9,), samples=True)],
        prefills=[Chunk(3, 15, (4, 5, 6), samples=False), Chunk(1, 0, (7, 8), samples=True)],
        pages=[
            PageUpdate(2, 0, (5, 11)),
            PageUpdate(0, 0, (2,)),
            PageUpdate(3, 0, (7, 1)),
            PageUpdate(1, 0, (0,)),
        ],
    )
    batch = build(builder, plan, last_ids)

    assert batch.token_ids.tolist() == [72, 9, 4, 5, 6, 7, 8]
    assert batch.positions.tolist() == [17, 3, 15, 16, 17, 0, 1]
    slots = [11 * PAGE_SIZE + 1, 2 * PAGE_SIZE + 3, 7 * PAGE_SIZE + 15, PAGE_SIZE, PAGE_SIZE + 1, 0, 1]
    assert batch.slot_mapping.tolist() == slots
    assert (batch.num_decodes, batch.longest_chunk) == (2, 3)
    assert (batch.decode_rows.tolist(), batch.decode_lens.tolist()) == ([2, 0], [18, 4])
    assert (batch.chunk_rows.tolist(), batch.chunk_lens.tolist()) == ([3, 1], [18, 2])
    assert batch.chunk_bounds.tolist() == [2, 5, 7]
    assert batch.sampled_rows.tolist() == [0, 1, 6]
    assert batch.page_table[2, :2].tolist() == [5, 11]
    assert batch.page_table[3, :2].tolist() == [7, 1]
    tensors = [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)]
    assert all(tensor.dtype == torch.int32 for tensor in tensors)


def test_pages_of_earlier_steps_are_remembered(builder):
    last_ids = torch.zeros(4, dtype=torch.int32)
    build(builder, StepPlan(prefills=[Chunk(1, 0, tuple(range(16)), samples=True)], pages=[PageUpdate(1, 0, (9,))]), last_ids)
    batch = build(builder, StepPlan(decodes=[Chunk(1, 16, (), samples=True)], pages=[PageUpdate(1, 1, (3,))]), last_ids)
    assert batch.slot_mapping.tolist() == [3 * PAGE_SIZE]
    assert batch.page_table[1, :2].tolist() == [9, 3]
    assert batch.chunk_bounds.tolist() == [1]
