"""Pools and page tables for tests of kernels that read or write K and V."""

import numpy as np
import torch

PAGE_SIZE = 16


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def zero_pool(num_rows, num_kv_heads, head_dim, device):
    """A bf16 buffer [num_rows, 2 * num_kv_heads, head_dim] of zeros. On a CPU its pages take memory only once written."""
    shape = (num_rows, 2 * num_kv_heads, head_dim)
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int16)).view(torch.bfloat16)
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def rows_with_content(pool, chunk=1 << 16):
    """Indices of the rows of a zero pool that hold anything but zeros, read in chunks."""
    flat = pool.flatten(1)
    return [
        start + int(row)
        for start in range(0, len(flat), chunk)
        if flat[start : start + chunk].any()
        for row in flat[start : start + chunk].any(dim=1).nonzero()
    ]


class PagedKeys:
    """K and V of some sequences in the shuffled pages of one pool; every other row of it holds NaN.

    Args:
        lengths: keys of each sequence.
        num_kv_heads, head_dim, dtype, device: of the pool.
        page_size: rows of a page.
        spare_pages: pages that belong to nobody.
    """

    def __init__(self, lengths, num_kv_heads, head_dim, device, dtype=torch.float32, page_size=PAGE_SIZE, spare_pages=3):
        counts = [-(-length // page_size) for length in lengths]
        num_pages = sum(counts) + spare_pages
        free = torch.randperm(num_pages).tolist()
        nobodys_page = free.pop()
        pool = torch.full((num_pages * page_size, 2 * num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        self.page_size, self.lengths = page_size, list(lengths)
        self.k_pool, self.v_pool = pool[:, :num_kv_heads], pool[:, num_kv_heads:]
        self.table_rows = torch.randperm(len(lengths) + 2)[: len(lengths)].to(device=device, dtype=torch.int32)
        self.page_table = torch.full(
            (len(lengths) + 2, max(counts, default=0) + 2), nobodys_page, dtype=torch.int32, device=device
        )
        for row, count, length in zip(self.table_rows.tolist(), counts, lengths, strict=True):
            self.page_table[row, :count] = int32([free.pop() for _ in range(count)], device)
            slots = self.slots_of(row, length)
            self.k_pool[slots] = torch.randn(length, num_kv_heads, head_dim, device=device).to(dtype)
            self.v_pool[slots] = torch.randn(length, num_kv_heads, head_dim, device=device).to(dtype)

    def slots_of(self, table_row, length):
        """Pool rows of the first ``length`` positions, int64."""
        positions = torch.arange(length, device=self.page_table.device)
        return self.page_table[table_row, positions // self.page_size].long() * self.page_size + positions % self.page_size

    def arguments(self):
        """What both attention ops take of it."""
        return {
            "k_pool": self.k_pool,
            "v_pool": self.v_pool,
            "page_table": self.page_table,
            "table_rows": self.table_rows,
            "page_size": self.page_size,
        }
