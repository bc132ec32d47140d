"""Pinned packages, their bill of materials, and a check of them against advisories."""
