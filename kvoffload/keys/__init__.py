"""The names of blocks: identity fingerprints, model and adapter digests, block hashes. Must not touch a cache."""
