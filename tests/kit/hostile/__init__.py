"""A hostile user of a server, an honest client of another domain, and messages that are forged field by field.

Everything is a process of its own, with a user of its own; so it needs root.
"""
