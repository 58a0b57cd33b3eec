"""Engines, one module each, imported by `registry.py` when chosen."""
