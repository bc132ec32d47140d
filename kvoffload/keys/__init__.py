"""Who a block belongs to: identity fingerprints, model and adapter digests, block hashes. Must not touch a cache."""
