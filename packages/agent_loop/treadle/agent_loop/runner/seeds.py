"""Seeds: independent random streams derived from names, the same on every machine.

Invariant: `derive_seed` is a pure function of its parts; different parts give unrelated seeds.
"""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2**63) from a base seed and the parts that identify its use."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
