"""Checks what on a machine, or in its settings, would stop kvoffload or slow it down, and says what to do about it."""
