"""Shared parts of the tests of `kvoffload.doctor`."""
