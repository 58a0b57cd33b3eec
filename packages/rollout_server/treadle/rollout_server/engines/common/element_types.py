"""The element types of torch."""

import torch

from treadle.rollout_server.engine import ElementType

TORCH_DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}
"""Element type -> torch dtype."""
