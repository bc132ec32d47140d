"""Tests on the real engine. They know kvoffload from outside, as vLLM does, and never replace a part of vLLM."""

if __name__ == "vllm":
    raise ImportError(
        "tests/ is on sys.path, so this package hides the real vllm; put the repository root there instead"
    )
