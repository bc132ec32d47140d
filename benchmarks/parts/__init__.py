"""Single parts of kvoffload measured alone, each next to the limit that it should approach."""
