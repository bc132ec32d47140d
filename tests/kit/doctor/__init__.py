"""What tests of `kvoffload.doctor` share."""
