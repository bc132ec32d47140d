"""What tests of `kvoffload.client` share."""
