"""A cache server's numbers over HTTP, by a process that has none of its memory."""
