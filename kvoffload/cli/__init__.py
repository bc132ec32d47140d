"""The command line. Parses, calls one other room, prints; must not hold logic that another room could."""
