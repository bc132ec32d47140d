"""Random mixtures of hostile users, an honest user, and a real server: each has a Unix user of its own.

`python -m tests.hostile` runs rounds that a seed decides: which server there is, which limits it has, which store is
behind it, and who attacks it. Each kind of attack is a function in `user.py` or a mode of a store in `stores.py`. The
messages come from the protocol's catalogue, so a new message is sent at its largest and at random, too.
"""
