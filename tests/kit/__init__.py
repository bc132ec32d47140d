"""Shared parts of tests, by the room that they serve: harnesses, fakes, contracts and stand-ins."""
