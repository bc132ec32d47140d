"""Engines with ranks on several machines: each node has a server of its own, and a block is there when all have it.

Nothing here opens a connection between machines: what the nodes tell each other goes with the engine's own steps.
"""
