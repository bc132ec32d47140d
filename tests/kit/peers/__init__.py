"""What tests of `kvoffload.peers` share."""
