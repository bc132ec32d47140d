"""What tests of `kvoffload.protocol` share."""
