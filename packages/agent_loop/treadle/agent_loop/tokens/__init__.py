"""Token ids: the ledger of a trajectory, the renderer interface, and the check for drift.

Only `transcript.py` writes ids, masks and log-probabilities. No tokenizer library is imported
here; the renderer of Hugging Face templates is in `hf/`.
"""
