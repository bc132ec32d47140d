"""Routers that hear vLLM's events: of others, as they are or as their source says, and what lies between."""
