"""What tests of `kvoffload.transfer` share."""
