"""Hints of engines and operators."""
