"""Answers of a server to its operators."""
