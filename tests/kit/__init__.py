"""Tests of several rooms share what is in here."""
