"""Shared parts of the tests of `kvoffload.client`."""
