"""Tests of commands share a process with others, and a dry run keeps torch out of transformers."""

# Before a dry run could: what comes after it in this process may need torch.
import transformers  # noqa: F401
