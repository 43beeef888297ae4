"""Tests of the benchmarks: what they print, record and refuse, with a clock that is made up."""
