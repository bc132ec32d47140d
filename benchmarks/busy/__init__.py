"""Measures whether hits survive on a machine that is not idle."""
