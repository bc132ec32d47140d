"""What tests of `kvoffload.cli` share."""
