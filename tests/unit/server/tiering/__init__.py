"""A server's traffic with slower tiers."""
