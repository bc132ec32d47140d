"""What tests of `kvoffload.top` share."""
