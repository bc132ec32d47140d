"""What tests of `kvoffload.kvspec` share."""
