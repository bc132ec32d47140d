"""Traces for comparing eviction policies, and the comparison's figures."""
