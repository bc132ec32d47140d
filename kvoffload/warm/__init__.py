"""Fills a pool before traffic: prompts from a file go to an engine once. Must not know what the engine or the cache
server is made of; it asks both over HTTP."""
