"""Shared parts of the tests of `kvoffload.web`."""
