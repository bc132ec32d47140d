"""Information about a server for operators, dashboards and engines' logs."""
