"""Requests' hints about their prefixes: retain, prefetch or release them. Must not wait, nor decide what is loaded."""
