"""What tests of `kvoffload.tiers` share."""
