"""Hugging Face tokenizers and their chat templates (extra ``[hf]``).

Here live the renderer, what it finds out about a template, and the places of images. The interface
that it implements is in `tokens/renderer.py`; no other folder of the package imports transformers.
"""

from treadle.agent_loop.hf.chat_renderer import HfRenderer

__all__ = ["HfRenderer"]
