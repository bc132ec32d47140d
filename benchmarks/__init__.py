"""Benchmarks for developers: of single parts, or of what needs an engine and the models of the tests, a trace, a GPU's
machine, or root.

`python -m benchmarks.NAME` runs each, in the clone's folder. What users measure on their machines is in
`kvoffload/bench`.
"""
