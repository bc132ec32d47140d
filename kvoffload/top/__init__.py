"""A cache server, watched from a terminal."""
