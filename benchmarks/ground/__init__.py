"""The proving ground: vLLM's scheduler and all of kvoffload at real models' sizes. Only the GPUs are virtual."""
