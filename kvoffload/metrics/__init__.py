"""What kvoffload measures of itself: one catalogue, and the recorder that fills it. Must not know who reads it."""
