"""How processes reach a server."""
