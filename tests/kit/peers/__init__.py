"""Shared parts of the tests of `kvoffload.peers`."""
