"""What joins an engine to the cache, whichever engine it is. Must import none of them."""
