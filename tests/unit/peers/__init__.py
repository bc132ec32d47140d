"""Other servers as a tier."""
