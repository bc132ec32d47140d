"""The connector on a real vLLM engine, beside the engine alone and other connectors; each engine is a process."""
