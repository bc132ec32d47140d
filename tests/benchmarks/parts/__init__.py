"""Tests of the benchmarks of single parts."""
