"""What the rows of the sampling family ask of their tensors before they launch."""

import torch

from rapid_llm.errors import KernelInputError, describe

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out_ids: torch.Tensor,
    *,
    max_vocab: int | None = None,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another and the vocabulary is no larger than ``max_vocab``."""
    row_values = (temperature, top_k, top_p, min_p, seeds, positions, out_ids)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32, torch.int32)
    fit = all(_per_row(values, logits, dtype) for values, dtype in zip(row_values, dtypes, strict=True))
    if not _logits_fit(logits, max_vocab) or not fit:
        raise KernelInputError(
            describe(
                "sample", logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds,
                positions=positions, out_ids=out_ids,
            ),
            wanted=f"{_wanted_logits(max_vocab)}; temperature, top_p, min_p fp32, top_k, positions, out_ids int32, seeds int64, "
            "each [num_seqs] with stride 1",
            change="pass one value of that dtype per row of logits",
        )  # fmt: skip


def check_top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    *,
    max_vocab: int | None = None,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another and the vocabulary is no larger than ``max_vocab``."""
    if (
        not _logits_fit(logits, max_vocab)
        or not _per_row(token_ids, logits, torch.int32)
        or not (out_ids.dim() == 2 and out_ids.shape == out_logprobs.shape and out_ids.shape[0] == logits.shape[0])
        or not 1 <= out_ids.shape[1] <= logits.shape[1] + 1
        or not (out_ids.dtype == torch.int32 and out_logprobs.dtype == torch.float32)
        or not (out_ids.device == out_logprobs.device == logits.device)
        or not (out_ids.stride(1) == out_logprobs.stride(1) == 1)
    ):
        raise KernelInputError(
            describe("top_logprobs", logits=logits, token_ids=token_ids, out_ids=out_ids, out_logprobs=out_logprobs),
            wanted=f"{_wanted_logits(max_vocab)}, token_ids [num_seqs] int32, out_ids int32 and out_logprobs fp32 of one shape "
            "[num_seqs, n + 1] with n at most vocab_size, inner stride 1",
            change="ask for no more log-probabilities than the vocabulary has tokens",
        )


def check_adjust_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    edit_rows: torch.Tensor,
    edit_ids: torch.Tensor,
    edit_values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raises: KernelInputError unless the tensors fit one another."""
    row_values = ((count_rows, torch.int32), *((values, torch.float32) for values in (repetition, presence, frequency)))
    edits = ((edit_rows, torch.int32), (edit_ids, torch.int32), (edit_values, torch.float32))
    if (
        not _logits_fit(logits, None)
        or not all(_per_row(values, logits, dtype) for values, dtype in row_values)
        or not (counts.dim() == 2 and counts.shape[1] == logits.shape[1] and counts.dtype == torch.int32)
        or not (out.shape == logits.shape and out.dtype == torch.float32)
        or not (counts.stride(1) == out.stride(1) == 1)
        or not (counts.device == out.device == logits.device)
        or not all(_per_row(values, edit_ids, dtype) and values.dim() == 1 for values, dtype in edits)
        or edit_ids.device != logits.device
    ):
        raise KernelInputError(
            describe(
                "adjust_logits", logits=logits, counts=counts, count_rows=count_rows, repetition=repetition, presence=presence,
                frequency=frequency, edit_rows=edit_rows, edit_ids=edit_ids, edit_values=edit_values, out=out,
            ),
            wanted=f"{_wanted_logits(None)}, counts [rows, vocab_size] int32 and out fp32 like logits, inner stride 1; "
            "count_rows int32, repetition, presence, frequency fp32, each [num_seqs]; edit_rows, edit_ids int32, edit_values "
            "fp32, each [num_edits]; all of stride 1",
            change="pass one value of that dtype per row of logits and per edit",
        )  # fmt: skip


def _wanted_logits(max_vocab: int | None) -> str:
    bound = "" if max_vocab is None else f" <= {max_vocab:,}"
    return f"logits [num_seqs, vocab_size{bound}] of a float dtype with inner stride 1"


def _logits_fit(logits: torch.Tensor, max_vocab: int | None) -> bool:
    """Whether ``logits`` is a float matrix of some columns, but not too many, with inner stride 1."""
    shaped = logits.dim() == 2 and logits.shape[1] > 0 and (max_vocab is None or logits.shape[1] <= max_vocab)
    return shaped and logits.dtype in _FLOATS and logits.stride(1) == 1


def _per_row(values: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``values`` is one dense ``dtype`` for each of ``rows``, on their device."""
    fits = values.shape == rows.shape[:1] and values.dtype == dtype
    return fits and values.device == rows.device and values.stride(0) == 1
