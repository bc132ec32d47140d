"""What tests of `kvoffload.bench` share."""
