"""Attention through the page table, one module per mapping."""
