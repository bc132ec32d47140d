"""Joins kvoffload to vLLM: its plugin entry point, connector classes, step plans and version differences.

It alone imports vllm, and nothing else in kvoffload may import it.
"""
