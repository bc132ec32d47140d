"""Sessions of a server, and the memory that it serves them."""
