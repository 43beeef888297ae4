"""Kernels that begin while the one before them ends, as they were compiled: what stands before they wait for it."""

import re

import pytest

from rapid_llm.kernels.testing.hazards import loaded_before_wait
from tests.compile.launches import MOE_GROUPS, compiled_call, counts_of, each_native_row, why_not_compiled

_LEAST_SM = 90
# Families of which every kernel of a Triton row begins so.
WHOLE_FAMILIES = ("activation", "embeddings", "fused", "kvcache", "moe", "norm", "quantization", "rotary", "sampling")
# Kernels that read what the kernel before them does not write, by contract, before they wait, and the arguments that this is.
READ_EARLY = {
    "_gemv_kernel": {"weight_ptr"},
    "_w8a16_gemv_kernel": {"weight_ptr"},
    "_fp4_gemv_kernel": {"words_ptr"},
    "_add_rms_norm_kernel": {"weight_ptr"},
    "_rope_kv_write_kernel": {"positions_ptr", "cos_sin_ptr", "slot_mapping_ptr", "q_weight_ptr", "k_weight_ptr"},
    "_flash_decoding_kernel": {"seq_lens_ptr", "table_rows_ptr", "page_table_ptr"},
    "_merge_splits_kernel": {"seq_lens_ptr"},
}
# By op, sizes whose launches are others than those of one token and of 64.
OTHER_SIZES = {
    "top_logprobs": ({"n": 40},),
    **{op: ({"group": 128 - group},) for op, group in MOE_GROUPS},
}

_WAIT = re.compile(r"^\s*griddepcontrol\.wait\s*;", re.MULTILINE)  # with no predicate
_END = re.compile(r"\b(?:ret|exit|trap|brx)\b")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_LABEL = re.compile(r"^(\$\w+):", re.MULTILINE)
_READ = re.compile(r"\b(?:ld(?:\.\w+)*?\.global|cp\.async(?!\.bulk\.prefetch))\b")  # a prefetch to the cache reads nothing
_WRITE = re.compile(r"\b(?:st(?:\.\w+)*?\.global|atom|red|cp\.reduce)\b")


def before_its_wait(launch):
    """The instructions in front of the first wait, in the order of the PTX."""
    code = re.sub(r"//.*", "", launch.ptx[launch.ptx.index(".entry") :])
    wait = _WAIT.search(code)
    assert wait, f"{launch.kernel} never waits"
    return code[: wait.start()]


def is_passed_by(before):
    """Whether a program may end, or jump behind its wait, in the instructions in front of it."""
    return bool(_END.search(before)) or not set(_BRANCH.findall(before)) <= set(_LABEL.findall(before))


def launches_of(row, device):
    """Those of one token, of 64, and of a few sizes more, but for equal ones."""
    count = counts_of(row)[0]
    sizes = ({count: 1}, {count: 64}, *({count: 64, **other} for other in OTHER_SIZES.get(row.op, ())))
    launches = [launch for other in sizes for launch in compiled_call(row, device, "bfloat16", **other)]
    return list({launch.variant: launch for launch in launches}.values())


@each_native_row
def test_a_kernel_that_begins_early_waits_before_it_touches_what_others_write(row, simulated, every):
    if why_not := why_not_compiled(row, simulated):
        pytest.skip(f"{row.name} {why_not}")
    if simulated.sm < _LEAST_SM:
        pytest.skip(f"{simulated.name} begins nothing early")
    if every > 1 and simulated.name != "h200":
        pytest.skip("where sweeps are shared out, the card that it was measured on stands for all")
    launches = launches_of(row, simulated)
    assert launches
    for launch in launches:
        begins_early = bool(launch.constexprs.get("PDL"))
        assert begins_early or row.target.split(".")[3] not in WHOLE_FAMILIES, f"{launch.kernel} waits to be launched"
        assert launch.compiled.metadata.launch_pdl == begins_early, f"{launch.kernel} is launched in another way than it waits"
        if not begins_early:
            continue
        before = before_its_wait(launch)
        assert not _WRITE.search(before), f"{launch.kernel} writes before it waits"
        assert not is_passed_by(before), f"{launch.kernel} has a way around its wait"
        early = READ_EARLY.get(launch.kernel)
        assert early or not _READ.search(before), f"{launch.kernel} reads before it waits"
        if early:
            read = loaded_before_wait(launch.ttgir)
            assert read, f"{launch.kernel} reads nothing early"
            assert read <= early, f"{launch.kernel} reads more than it may before it waits"
