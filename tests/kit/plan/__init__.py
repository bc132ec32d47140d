"""What tests of `kvoffload.plan` share."""
