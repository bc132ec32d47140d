"""The parts of our secondary tier, which vLLM's own offloading may use behind its CPU memory."""
