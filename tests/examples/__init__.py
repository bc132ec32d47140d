"""Tests that run what is in examples/."""
