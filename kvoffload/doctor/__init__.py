"""What of a machine and its settings would stop kvoffload, or slow it down, and what to do about it."""
