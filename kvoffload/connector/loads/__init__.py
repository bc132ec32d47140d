"""From the question how much of a prompt is there to its last byte in the engine."""
