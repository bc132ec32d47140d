"""Joins kvoffload to SGLang: its external linker, the pools that it moves pages of, and what names them.

It imports sglang only where the engine asks `plugin` for the linker, and nothing else in kvoffload may import it.
"""
