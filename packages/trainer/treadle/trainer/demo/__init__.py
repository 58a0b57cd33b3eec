"""Models and rows of the demos, made by `examples/warm_start`."""

from pathlib import Path

DEMO = Path(__file__).parent / "calculator" / "config.yaml"
"""The configuration of a run that names none."""
