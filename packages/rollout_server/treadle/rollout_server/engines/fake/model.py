"""The fake model: a distribution over next tokens that is computed by hashing.

Invariant: the distribution depends only on the fingerprint of the weights and the prefix (its
ids and the bytes of its images), and the sampled token also on the seed and the position. So
every token is predictable, and a change of weights or of an image changes nearly every token
after it. Pure; no engine state.

A position has at most eight candidate ids with logits in [0, 4), enough for sampling parameters
to have their real effect and log-probs their real values.
"""

import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping

from treadle.rollout_server.engine import ModelInfo, NamedTensor, Sampling
from treadle.rollout_server.sampling_mask import encode

BLOCK_TOKENS = 16
"""Tokens in a prefix-cache block."""

_CANDIDATES = struct.Struct("<8I8H")
_LOGIT_RANGE = 4.0
LEAST_LOGPROB = -100.0
"""Log-probability of an id that is no candidate; no loss can use minus infinity."""


class Prefix:
    """A growing sequence of ids with an incremental hash."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=_CANDIDATES.size)
        self.length = 0
        self.seen: set[int] = set()
        for _ in self.extend(token_ids):
            pass

    def extend(self, token_ids: Iterable[int]) -> Iterator[bytes]:
        """Appends ids; yields the key of each completed cache block."""
        for token_id in token_ids:
            self._hash.update(token_id.to_bytes(4, "little"))
            self.seen.add(token_id)
            self.length += 1
            if self.length % BLOCK_TOKENS == 0:
                yield self._hash.digest()

    def add_image(self, image_digest: bytes) -> None:
        """Adds an image; its placeholder ids follow."""
        self._hash.update(image_digest)

    def digest(self, fingerprint: bytes) -> bytes:
        """Returns 48 bytes that identify this prefix under these weights."""
        mixed = self._hash.copy()
        mixed.update(fingerprint)
        return mixed.digest()


def image_digest(data: bytes) -> bytes:
    """Returns 32 bytes that identify an image."""
    return hashlib.blake2b(data, digest_size=32).digest()


def fingerprint_of(tensors: Iterable[tuple[str, str, int]]) -> bytes:
    """Returns the fingerprint of a set of weights, independent of its order.

    Args:
        tensors: (name, label, CRC-32 of the bytes) of each tensor.
    """
    total = hashlib.blake2b(digest_size=16)
    for entry in sorted(tensors):
        total.update(repr(entry).encode())
    return total.digest()


def fingerprint_entry(tensor: NamedTensor, crc32: int = 0) -> tuple[str, str, int]:
    """Returns a tensor's entry for `fingerprint_of`; `crc32` covers the parts before it."""
    return tensor.spec.name, tensor.spec.label, zlib.crc32(tensor.data, crc32)


def logits(prefix: Prefix, fingerprint: bytes, vocab_size: int) -> dict[int, float]:
    """Returns the candidate ids after a prefix and their logits, sorted by id."""
    fields = _CANDIDATES.unpack(prefix.digest(fingerprint))
    found: dict[int, float] = {}
    for raw_id, raw_logit in zip(fields[:8], fields[8:], strict=True):
        token_id = raw_id % vocab_size
        found[token_id] = max(found.get(token_id, 0.0), raw_logit / 65536 * _LOGIT_RANGE)
    return dict(sorted(found.items()))


def sample(
    candidates: dict[int, float], sampling: Sampling, *, seen: set[int], seed: int, position: int
) -> tuple[int, float]:
    """Samples the next token.

    Args:
        seen: Ids of the prefix, which `repetition_penalty` penalises.
        position: Index of the token in prompt plus completion.

    Returns:
        The id, and its log-probability in nats under the sampled distribution.
    """
    if sampling.temperature == 0:
        scores = _scores(candidates, sampling, seen)
        return max(scores, key=lambda token_id: (scores[token_id], -token_id)), 0.0
    weights = _weights(candidates, sampling, seen)
    total = sum(weights.values())
    target = _uniform(seed, position) * total
    # Rounding may leave a small remainder after the last id; it counts for the most likely id.
    drawn = next(iter(weights))
    for token_id, weight in weights.items():
        target -= weight
        if target < 0:
            drawn = token_id
            break
    return drawn, min(0.0, math.log(weights[drawn] / total))


def sampling_mask(
    candidates: dict[int, float], sampling: Sampling, *, seen: set[int], drawn: int, vocab_size: int
) -> bytes:
    """Returns the sampling mask of a token that `sample` drew."""
    kept = {drawn} if sampling.temperature == 0 else _weights(candidates, sampling, seen)
    return encode(sorted(kept), drawn, vocab_size)


def _weights(candidates: dict[int, float], sampling: Sampling, seen: set[int]) -> dict[int, float]:
    """Returns unnormalised probabilities of the ids that may be drawn, most likely first."""
    return _truncated(_scores(candidates, sampling, seen), sampling)


def _scores(candidates: dict[int, float], sampling: Sampling, seen: set[int]) -> dict[int, float]:
    return {
        token_id: _penalised(logit, sampling.repetition_penalty) if token_id in seen else logit
        for token_id, logit in candidates.items()
    }


def prompt_logprobs(
    token_ids: Iterable[int],
    images: Mapping[int, bytes],
    fingerprint: bytes,
    vocab_size: int,
    *,
    first: int,
) -> tuple[float, ...]:
    """Returns the log-probabilities of a prompt's ids from position `first` on.

    Args:
        images: Digests of its images by the position of their first placeholder.
        first: A number of at least 1.
    """
    found: list[float] = []
    prefix = Prefix()
    for position, token_id in enumerate(token_ids):
        if position >= first:
            candidates = logits(prefix, fingerprint, vocab_size)
            total = math.log(sum(map(math.exp, candidates.values())))
            found.append(candidates[token_id] - total if token_id in candidates else LEAST_LOGPROB)
        if position in images:
            prefix.add_image(images[position])
        for _ in prefix.extend((token_id,)):
            pass
    return tuple(found)


def routed_experts(token_ids: Iterable[int], model: ModelInfo) -> bytes:
    """Returns experts for rows, as `Tokens.routed_experts`: neighbours, from id plus layer on."""
    return b"".join(
        ((token_id + layer + choice) % model.num_experts).to_bytes(model.expert_id_bytes, "little")
        for token_id in token_ids
        for layer in range(model.num_moe_layers)
        for choice in range(model.experts_per_token)
    )


def _penalised(logit: float, penalty: float) -> float:
    return logit / penalty if logit > 0 else logit * penalty


def _truncated(scores: dict[int, float], sampling: Sampling) -> dict[int, float]:
    """Returns unnormalised probabilities of the ids that pass the filters, most likely first."""
    peak = max(scores.values())
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: sampling.top_k]
    weights = [(i, math.exp((score - peak) / sampling.temperature)) for i, score in ranked]
    limit = sampling.top_p * sum(weight for _, weight in weights)
    kept: dict[int, float] = {}
    before = 0.0
    for token_id, weight in weights:
        # Nucleus: keep an id while the more likely ones have not reached top_p (1904.09751).
        if kept and before >= limit:
            break
        kept[token_id] = weight
        before += weight
    floor = sampling.min_p * weights[0][1]
    return {token_id: weight for token_id, weight in kept.items() if weight >= floor}


def _uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) that depends only on its arguments."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) / (1 << 53)
