"""RMS norm behind the residual sum in CUDA C++, for steps of few tokens, where a launch is most of what a norm costs.

Bound by latency there, by memory at many tokens. One program a token and one 16-byte piece of its row a thread, so that all loads
of a row are under way at once and the only wait is for the sum over threads; the arithmetic is triton.add_rms_norm's.
"""

import torch

from rapid_llm.errors import KernelInputError, describe
from rapid_llm.kernels.jit.driver import cuda_kernel
from rapid_llm.kernels.ops.norm.inputs import check_add_rms_norm

CUDA_SOURCE = "add_rms_norm.cu"
FUNCTIONS = {
    torch.float32: "add_rms_norm_float32",
    torch.bfloat16: "add_rms_norm_bfloat16",
    torch.float16: "add_rms_norm_float16",
}
LAYOUT = "PPPPqqqif"  # x, residual, weight, out; their row strides but for the weight's; d, eps
MAX_THREADS = 1024
_BYTES_OF_A_WARP = 512  # 32 threads with a piece of 16 bytes each


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to ``residual`` in place, rounded to its dtype, write rms_norm(residual) into ``out`` and return that.

    Args:
        x: [num_tokens, d], fp32 | bf16 | fp16, on a CUDA device; inner stride 1, row stride free.
        residual: like x; read and written; apart from x and out.
        weight: [d], same dtype; stride 1.
        out: like x; inner stride 1, row stride free; may be x itself.
        eps: added to the mean square.
    Raises: KernelInputError on any other shape, dtype, stride or device; nothing is launched then. The first call on a device
        also raises what ``kernels/jit/driver.py::cuda_kernel`` does.
    Twin: kernels/reference/norm.py::add_rms_norm. Origin: this repo.
    """
    check_add_rms_norm(x, residual, weight, out)
    if not x.is_cuda:
        raise KernelInputError(
            describe("add_rms_norm", x=x, residual=residual, weight=weight, out=out),
            wanted="tensors on a CUDA device",
            change="take the row that dispatch names for this device",
        )
    num_tokens, d = x.shape
    if x.numel():
        launch = cuda_kernel(CUDA_SOURCE, FUNCTIONS[x.dtype], LAYOUT, x.device.index)
        launch(
            num_tokens,
            min(MAX_THREADS, 32 * -(-d * x.element_size() // _BYTES_OF_A_WARP)),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            d,
            eps,
        )
    return out
