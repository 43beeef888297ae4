"""Prefill in Gluon as far as a host without a GPU shows it: which calls the kernel takes, which go to the Triton row, how many
programs are launched. Gluon has no interpreter: what the kernel computes is tested on a GPU, by test_attention_ops.py."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from rapid_llm.errors import KernelInputError
from rapid_llm.kernels.device import device_info, simulate_launches
from rapid_llm.kernels.dispatcher.catalog import catalog
from rapid_llm.kernels.verify.runner import case_maker
from tests.kernels.kv_pools import int32

pytest.importorskip("triton", reason="the row's module imports Triton")

H200 = device_info("h200")


@pytest.fixture
def calls(monkeypatch):
    """The row's function, and what it called: ("gluon", programs) or ("triton", arguments). Nothing runs."""
    module = importlib.import_module("rapid_llm.kernels.ops.attention.flashattention2_nopad_gluon")
    made = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: made.append(("gluon", grid))

    def triton_row(*args, **kwargs):
        made.append(("triton", (args, kwargs)))
        return kwargs["out"]

    monkeypatch.setattr(module, "_flashattention2_nopad_kernel", Kernel())
    monkeypatch.setattr(module, "merge_splits", lambda *_: None)
    monkeypatch.setattr(module.triton_row, "flashattention2_nopad", triton_row)
    with simulate_launches(H200):
        yield SimpleNamespace(op=module.flashattention2_nopad, made=made)


def arguments(dtype=torch.bfloat16, head_dim=128, page_size=16, heads=(4, 2), q_lens=(20, 6)):
    """Of a call that the kernel takes: dense queries, both pools in one buffer."""
    num_seqs = len(q_lens)
    pool = torch.zeros(8 * page_size, 2 * heads[1], head_dim, dtype=dtype)
    q = torch.zeros(sum(q_lens), heads[0], head_dim, dtype=dtype)
    return {
        "q": q,
        "k_pool": pool[:, : heads[1]],
        "v_pool": pool[:, heads[1] :],
        "page_table": torch.zeros(num_seqs, 8, dtype=torch.int32),
        "table_rows": torch.arange(num_seqs, dtype=torch.int32),
        "cu_seqlens_q": int32([0, *torch.tensor(q_lens).cumsum(0)], "cpu"),
        "seq_lens": int32(q_lens, "cpu"),
        "out": torch.full_like(q, 7.0),
        "page_size": page_size,
        "sm_scale": 0.125,
        "max_seqlen_q": max(q_lens, default=0),
    }


def strided(tensor, strides, offset=0):
    """Zeros of the shape and dtype of ``tensor``, laid out so."""
    shape = zip(tensor.shape, strides, strict=True)
    room = 1 + offset + sum((size - 1) * stride for size, stride in shape)
    return torch.zeros(room, dtype=tensor.dtype).as_strided(tensor.shape, strides, offset)


TAKEN = [
    pytest.param({}, {}, id="bf16"),
    pytest.param({"dtype": torch.float16}, {}, id="fp16"),
    *(pytest.param({"page_size": size}, {}, id=f"page-size-{size}") for size in (8, 64, 128)),
    pytest.param({}, {"q": lambda q: strided(q, (8 * 128, 128, 1))}, id="queries-among-keys-and-values"),
    pytest.param({}, {"q": lambda q: strided(q, (4 * 128, 128, 1), 8)}, id="queries-16-bytes-on"),
    pytest.param({"heads": (4, 1)}, {"k_pool": lambda pool: strided(pool, (136, 999, 1))}, id="one-head-has-no-next"),
    pytest.param({}, {"out": lambda out: strided(out, (4 * 129 + 1, 129, 1), 1)}, id="any-result"),
]


@pytest.mark.parametrize(("sizes", "changes"), TAKEN)
def test_what_the_memory_engine_can_read_is_taken(sizes, changes, calls):
    given = arguments(**sizes)
    given |= {name: change(given[name]) for name, change in changes.items()}

    assert calls.op(**given) is given["out"]

    assert [row for row, _ in calls.made] == ["gluon"]


NOT_TAKEN = [
    pytest.param({"dtype": torch.float32}, {}, id="fp32"),
    pytest.param({"head_dim": 64}, {}, id="head-dim-64"),
    pytest.param({"head_dim": 256}, {}, id="head-dim-256"),
    pytest.param({"page_size": 4}, {}, id="page-size-4"),
    pytest.param({"page_size": 256}, {}, id="page-size-256"),
    pytest.param({}, {"q": lambda q: strided(q, (4 * 128 + 4, 128, 1))}, id="rows-begin-at-8-bytes"),
    pytest.param({}, {"q": lambda q: strided(q, (4 * 136, 136, 1))}, id="heads-apart"),
    pytest.param({}, {"q": lambda q: strided(q, (4 * 128, 128, 1), 1)}, id="queries-begin-at-2-bytes"),
    pytest.param({}, {"q": lambda q: q[:1].expand_as(q)}, id="one-row-for-all"),
    pytest.param({}, {"k_pool": lambda pool: strided(pool, (2 * 128 + 1, 128, 1))}, id="odd-rows-of-keys"),
    pytest.param({}, {"v_pool": lambda pool: strided(pool, (128, 128 * 128, 1))}, id="values-head-by-head"),
    pytest.param({}, {name: lambda pool: pool[:0] for name in ("k_pool", "v_pool")}, id="a-pool-of-nothing"),
]


@pytest.mark.parametrize(("sizes", "changes"), NOT_TAKEN)
def test_what_it_cannot_read_goes_to_the_triton_row_as_it_came(sizes, changes, calls):
    given = arguments(**sizes)
    given |= {name: change(given[name]) for name, change in changes.items()}

    assert calls.op(**given) is given["out"]

    [(row, (args, kwargs))] = calls.made
    assert row == "triton"
    handed_on = dict(zip(given, args, strict=False)) | kwargs
    assert handed_on.keys() == given.keys()
    assert all(handed_on[name] is value for name, value in given.items() if torch.is_tensor(value))
    assert all(handed_on[name] == value for name, value in given.items() if not torch.is_tensor(value))


@pytest.mark.parametrize("name", ["a100", "b200", "rtx5090"])
def test_another_architecture_has_the_triton_row(name, calls):
    with simulate_launches(device_info(name)):
        calls.op(**arguments())
    assert [row for row, _ in calls.made] == ["triton"]


@pytest.mark.parametrize(
    ("q_lens", "heads", "programs"),
    [
        pytest.param((20,), (4, 2), 4, id="a-tile-of-each-head"),
        pytest.param((128, 129, 1), (4, 2), 20, id="two-whole-tiles-and-a-rest-of-each"),
        pytest.param((4096,), (32, 8), 132, id="more-items-than-multiprocessors"),
    ],
)
def test_no_more_programs_are_launched_than_there_are_multiprocessors(q_lens, heads, programs, calls):
    calls.op(**arguments(q_lens=q_lens, heads=heads))
    [(_, (launched,))] = calls.made
    assert launched == programs


@pytest.mark.parametrize("changes", [{"q_lens": ()}, {"q_lens": (0, 0)}], ids=["no-sequences", "no-queries"])
def test_nothing_to_attend_launches_nothing(changes, calls):
    given = arguments(**changes)
    assert calls.op(**given) is given["out"]
    assert not calls.made


def test_the_cases_that_make_its_evidence_reach_the_kernel_itself(calls):
    """What it hands on would pass by the Triton row's work."""
    contract = catalog().contract("flashattention2_nopad")
    [row] = [row for row in catalog().rows[contract.op] if row.name.startswith("gluon.")]
    reached = set()
    for dtype in row.dtypes:
        for sizes in filter(row.allows, contract.sweep):
            make = case_maker(catalog(), contract.op)
            calls.made.clear()
            calls.op(**make(sizes, getattr(torch, dtype), torch.device("cpu"), torch.Generator().manual_seed(0), None).arguments)
            reached |= {(dtype, sizes["page_size"], sizes["kv_len"] > 1024) for row, _ in calls.made if row == "gluon"}
    assert reached >= {
        ("bfloat16", 16, False),
        ("bfloat16", 16, True),  # of more keys than a split has at least
        ("bfloat16", 128, False),
        ("float16", 8, True),
        ("float16", 64, False),
    }


MISREAD = [
    pytest.param({"q": lambda q: torch.stack([q, q], dim=-1)[..., 0]}, id="every-other-entry"),
    pytest.param({"q": lambda q: q.half()}, id="mixed-dtypes"),
    pytest.param({"q": lambda q: q[:, :3]}, id="heads-not-a-multiple"),
    pytest.param({"v_pool": lambda pool: pool[1:]}, id="pools-of-two-lengths"),
    pytest.param({"page_table": lambda table: table.long()}, id="int64-table"),
    pytest.param({"cu_seqlens_q": lambda ends: ends.long()}, id="int64-offsets"),
    pytest.param({"page_size": lambda _: 24}, id="page-size-24"),
    pytest.param({"sm_scale": lambda _: 0.0}, id="scale-0"),
    pytest.param({"max_seqlen_q": lambda _: -1}, id="negative-length"),
]


@pytest.mark.parametrize("changes", MISREAD)
def test_what_the_triton_row_refuses_is_refused_here_and_nothing_launched(changes, calls):
    given = arguments()
    given |= {name: change(given[name]) for name, change in changes.items()}
    with pytest.raises(KernelInputError, match="flashattention2_nopad"):
        calls.op(**given)
    assert not calls.made
    assert (given["out"] == 7.0).all()
