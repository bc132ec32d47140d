"""Everything that decodes bytes from outside, under a fuzzer. `decoders.py` lists all of it, the native core's too.

A target is a module with `make_seeds()`, inputs that the real writers make, and `run(data)`, which raises where bytes
did what they must not. `python -m tests.fuzz NAME [libFuzzer flags] CORPUS` runs one.
"""
