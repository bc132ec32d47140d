"""What tests of `kvoffload.connector` share."""
