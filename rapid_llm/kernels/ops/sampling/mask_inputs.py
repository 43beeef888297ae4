"""What the rows of mask_logits ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor, out: torch.Tensor) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    if (
        not (logits.dim() == masks.dim() == 2 and logits.shape[1] > 0 and logits.dtype in _FLOATS)
        or not (out.shape == logits.shape and out.dtype == torch.float32)
        or not (masks.shape[1] == -(-logits.shape[1] // 32) and masks.dtype == torch.int32)
        or not (mask_rows.shape == logits.shape[:1] and mask_rows.dtype == torch.int32)
        or not (logits.stride(1) == masks.stride(1) == out.stride(1) == mask_rows.stride(0) == 1)
        or not (logits.device == masks.device == out.device == mask_rows.device)
    ):
        raise KernelInputError(
            describe("mask_logits", logits=logits, masks=masks, mask_rows=mask_rows, out=out),
            wanted="logits [num_seqs, vocab_size] of a float dtype, out fp32 like them, masks [num_masks, ceil(vocab_size / 32)] "
            "int32, inner stride 1; mask_rows [num_seqs] int32 of stride 1",
            change="pass one bit for each column of logits, and one row of masks or -1 for each row",
        )
