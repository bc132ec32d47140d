"""The parts that join any engine to the cache. Must not import an engine."""
