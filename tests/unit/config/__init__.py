"""Settings, their types and sources."""
