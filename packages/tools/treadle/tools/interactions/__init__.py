"""Interactions: simulated users, and the catalogue that names them."""

from treadle.tools.interactions.catalog import load_interactions
from treadle.tools.interactions.gsm8k import Gsm8kInteraction

__all__ = ["Gsm8kInteraction", "load_interactions"]
