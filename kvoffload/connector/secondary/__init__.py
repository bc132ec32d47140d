"""These are the parts of the tier that vLLM's own offloading may have below its CPU memory."""
