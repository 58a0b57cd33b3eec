"""Hugging Face tokenizers and their chat templates (extra `[hf]`).

This folder holds the renderer, the probing of templates, and the placeholders of images. The
interface is in `tokens/renderer.py`; no other folder of the package may import transformers.
"""

from treadle.agent_loop.extras import needs_extra

with needs_extra("hf", __name__):
    from treadle.agent_loop.hf.chat_renderer import HfRenderer

__all__ = ["HfRenderer"]
