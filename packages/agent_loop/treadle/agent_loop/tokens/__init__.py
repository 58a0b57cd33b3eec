"""Token ids: the ledger of a trajectory, the renderer interface, and retokenization drift.

Only `transcript.py` writes ids, masks and log-probabilities. This folder imports neither a
tokenizer library nor `loops/`; the renderer of Hugging Face templates is in `hf/`.
"""
