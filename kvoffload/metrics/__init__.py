"""The metrics of kvoffload: one catalogue, and the recorder that fills it. Must not know who reads them."""
