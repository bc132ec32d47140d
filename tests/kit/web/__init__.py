"""What tests of `kvoffload.web` share."""
