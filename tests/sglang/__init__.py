"""Tests on the real SGLang engine. They know kvoffload from outside, as SGLang does."""

if __name__ == "sglang":
    raise ImportError(
        "tests/ is on sys.path, so this package hides the real sglang; put the repository root there instead"
    )
