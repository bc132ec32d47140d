"""kvoffload keeps the KV cache of an LLM engine outside the accelerator, byte-exact or not at all."""

__version__ = "0.1.0"
