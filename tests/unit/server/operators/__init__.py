"""What operators are told of a server."""
