"""vLLM's own side: its versions' differences, its layers' pages, its start, counts and traces."""
