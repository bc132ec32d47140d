"""What tests of `kvoffload.sglang` share."""
