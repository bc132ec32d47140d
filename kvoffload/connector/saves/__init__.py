"""Saves decide which blocks go to the cache and when, and follow them until every rank has copied its bytes."""
