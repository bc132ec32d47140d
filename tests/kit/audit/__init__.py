"""A stand-in for the engine that `kvoffload audit` asks."""
