"""Compares answers that an engine computes with answers from restored blocks, over HTTP. Must not know which engine or
connector it is."""
