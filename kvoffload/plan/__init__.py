"""Computes the memory of a model's cached tokens, and how many of them a machine can hold, before anything runs."""
