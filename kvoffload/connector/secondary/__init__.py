"""What a secondary tier of vLLM's own offloading consists of."""
