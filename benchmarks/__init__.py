"""Benchmarks that need more than kvoffload itself: an engine, or a GPU's machine."""
