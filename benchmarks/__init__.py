"""Benchmarks that need a clone: an engine and the models of the tests, a trace, a GPU's machine, or root.

`python -m benchmarks.NAME` runs each, in the clone's folder. What a user measures on a machine is in `kvoffload/bench`.
"""
