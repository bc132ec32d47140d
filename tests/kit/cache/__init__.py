"""What tests of `kvoffload.cache` share."""
