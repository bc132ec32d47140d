"""vLLM's own side is known here: how its versions differ, its layers' pages, its start, counts and traces."""
