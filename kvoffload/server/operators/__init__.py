"""What operators, dashboards and engines' logs are told of a server."""
