"""Writes into the KV pool and the page table."""
