"""Tools and rewards for agent loops, and the catalogue that names them.

The tools are `treadle.tools.calculator.CalculatorTool` and `treadle.tools.gsm8k.Gsm8kTool`;
rewards are looked up in `treadle.tools.rewards`.
"""

from treadle.tools.calculator import CalculatorTool
from treadle.tools.catalog import load_catalogue
from treadle.tools.gsm8k import Gsm8kTool

__all__ = ["CalculatorTool", "Gsm8kTool", "load_catalogue"]
