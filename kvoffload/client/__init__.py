"""client: what an engine's processes use of a cache server. Must not know which engine that is."""
