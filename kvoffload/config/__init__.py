"""Every setting: its type, its bounds, the addresses that it may name, and where its value comes from."""
