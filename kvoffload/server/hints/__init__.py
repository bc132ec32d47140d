"""Serves hints of engines and operators: prefixes that are retained, or brought up before their request comes. Knows no
sockets, and nothing in it waits."""
