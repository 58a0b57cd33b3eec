"""Images of sequences, for any backend: patches, rows and positions.

- `shape`: the tower, read from config.json, without torch.
- `reader`: patches of the bytes of images; `positions`: positions of tokens.
- `rows`: which rows of a micro-batch are images.
"""
