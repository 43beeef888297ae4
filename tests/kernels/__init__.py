"""Tests of the kernel tier."""
