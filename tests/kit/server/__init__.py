"""Servers for tests, and whatever speaks to them: honest, raw, foreign or hostile."""
