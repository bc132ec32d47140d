"""A small engine that keeps its KV cache with kvoffload, on CPU and CUDA: the library's second user. See run.py."""
