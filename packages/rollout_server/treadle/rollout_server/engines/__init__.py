"""Engines, one package each; `registry.py` imports the selected one."""
