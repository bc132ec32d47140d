"""What `kvoffload warm` asks, played."""
