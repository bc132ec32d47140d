"""Loads bring what the cache has of a prompt into the engine: how much there is, whether it pays, and every byte."""
