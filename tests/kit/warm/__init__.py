"""Stand-ins for the engine and the server that `kvoffload warm` asks."""
