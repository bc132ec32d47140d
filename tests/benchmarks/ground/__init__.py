"""Tests of the proving ground's parts."""
