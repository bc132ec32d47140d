"""Engines may share blocks if their models, weights, pages and adapters hold the same, which is found out here."""
