"""Measures the connector on a real vLLM engine, in turn with the engine alone and other connectors."""
