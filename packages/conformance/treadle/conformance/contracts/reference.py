"""The reference for engines: transformers' logits for a checkpoint, and the sampling distributions.

Invariant: nothing here is shared with any engine. The filters are implemented a second time, from
the documentation of `Sampling`, over one row of float64 logits.

Needs torch and transformers, so it is imported only where they are needed.
"""

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from treadle.rollout_server.engine import PromptImage, Sampling

_MODELS: Any = AutoModelForCausalLM
_VISION_MODELS: Any = AutoModelForImageTextToText


class Reference:
    """A checkpoint in transformers, in float32 on the CPU."""

    def __init__(self, directory: Path) -> None:
        model = _MODELS.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.eval()

    def logits(self, token_ids: Sequence[int], *, start: int) -> torch.Tensor:
        """Returns the next-token logits at each of ``token_ids[start:]``, ``[T - start, V]``."""
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits
        return found[0, start:].double()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Returns greedy tokens from ``generate``, which ignores end of sequence."""
        inputs = torch.tensor([list(prompt)])
        with torch.no_grad():
            found = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                repetition_penalty=1.0,
            )
        return tuple(found[0, len(prompt) :].tolist())

    def shortfall(self, prompt: Sequence[int], completion: Sequence[int]) -> float:
        """Returns by how many nats a completion token is less likely than the likeliest, at most.

        It is 0 for greedy tokens.
        """
        ids = (*prompt, *completion)
        logp = self.logits(ids[:-1], start=len(prompt) - 1).log_softmax(-1)
        taken = logp.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        return float((logp.amax(-1) - taken).max())

    def logprobs(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        sampling: Sampling,
        *,
        slack: float = 0.0,
    ) -> list[float]:
        """Returns the log-prob of each completion token under its sampling distribution.

        Args:
            prompt: Token ids of the prompt.
        """
        ids = (*prompt, *completion)
        logits_TV = self.logits(ids[:-1], start=len(prompt) - 1)
        return _of_each(logits_TV, ids, len(prompt), sampling, slack)

    def continued_logprobs(
        self,
        before: "Reference",
        prompt: Sequence[int],
        completion: Sequence[int],
        sampling: Sampling,
        *,
        switched: int,
    ) -> list[float]:
        """Returns log-probs of tokens after a switch of weights that keeps keys and values.

        Args:
            before: The weights that sampled ``completion[:switched]``.
            prompt: Token ids of the prompt.
            switched: Number of tokens sampled before the switch, at least 1. The last of them is
                the first that the new weights process.

        Returns:
            The log-probs of ``completion[switched:]``.
        """
        ids = (*prompt, *completion)
        place = len(prompt) + switched
        with torch.no_grad():
            kept = before._model(torch.tensor([ids[: place - 1]]), use_cache=True)
            rest = self._model(
                torch.tensor([ids[place - 1 : -1]]),
                past_key_values=kept.past_key_values,
                use_cache=True,
            )
        return _of_each(rest.logits[0].double(), ids, place, sampling)


class VisionReference:
    """A vision model and its image processor, called as documented by transformers.

    Needs Pillow.
    """

    def __init__(self, path: Path) -> None:
        self._model: Any = _VISION_MODELS.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # Late: it needs Pillow, and a text model has to do without.
        from transformers import AutoImageProcessor

        processors: Any = AutoImageProcessor
        self._processor: Any = processors.from_pretrained(path)

    def greedy(
        self, prompt: Sequence[int], images: Sequence[PromptImage], max_tokens: int
    ) -> list[int]:
        """Returns the ids that `generate` samples, ignoring end-of-sequence ids."""
        inputs = self._inputs(prompt, images)
        ids = self._model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return list(ids[0, len(prompt) :].tolist())

    def logprobs(
        self, prompt: Sequence[int], images: Sequence[PromptImage], ids: Sequence[int]
    ) -> list[float]:
        """Returns log-probs of `ids` after `prompt`, at temperature 1, in one uncached pass."""
        with torch.no_grad():
            logits = self._model(**self._inputs((*prompt, *ids), images)).logits
        logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return list(logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())

    def _inputs(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> dict[str, Any]:
        ids = torch.tensor([list(prompt)])
        kinds = torch.zeros_like(ids)
        for image in images:
            kinds[0, image.start : image.stop] = 1
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
        if images:
            from PIL import Image

            opened = [Image.open(io.BytesIO(image.data)) for image in images]
            inputs |= self._processor(images=opened, return_tensors="pt")
        return inputs


@functools.lru_cache(maxsize=4)
def reference(directory: Path) -> Reference:
    """Returns the reference for a directory, cached."""
    return Reference(directory)


@functools.lru_cache(maxsize=4)
def vision_reference(directory: Path) -> VisionReference:
    """Returns the reference for a directory of a vision model, cached."""
    return VisionReference(directory)


def distribution(
    logits_V: torch.Tensor, seen: Sequence[int], sampling: Sampling, slack: float = 0.0
) -> torch.Tensor:
    """Returns the log-probs of all ids, ``[V]``; minus infinity for ids that a filter drops.

    Args:
        seen: Ids of the prompt and of the completion so far.
        sampling: Sampling parameters with a temperature above 0.
        slack: By how many nats a filter may misjudge an id and keep it. Above 0, only which ids are
            dropped has a meaning.
    """
    loose = math.exp(-slack)
    scores = logits_V.clone()
    penalty = sampling.repetition_penalty
    for token_id in set(seen) if penalty != 1 else ():  # Most ask for none, and it is slow.
        score = scores[token_id]
        scores[token_id] = score / penalty if score > 0 else score * penalty
    probabilities = torch.softmax(scores / sampling.temperature, 0)
    if sampling.top_k is not None and sampling.top_k < len(probabilities):
        least = probabilities.topk(sampling.top_k).values[-1]
        probabilities[probabilities < least * loose] = 0.0
    probabilities = probabilities / probabilities.sum()
    likeliest = probabilities.sort(descending=True)
    before = likeliest.values.cumsum(0) - likeliest.values
    dropped = likeliest.indices[before * loose >= sampling.top_p]
    probabilities[dropped] = 0.0
    probabilities[probabilities < sampling.min_p * probabilities.max() * loose] = 0.0
    return (probabilities / probabilities.sum()).log()


def _of_each(
    logits_TV: torch.Tensor,
    ids: Sequence[int],
    place: int,
    sampling: Sampling,
    slack: float = 0.0,
) -> list[float]:
    """Returns the log-probs of ``ids[place:]``, given one row of logits per id."""
    return [
        float(distribution(row_V, ids[: place + index], sampling, slack)[ids[place + index]])
        for index, row_V in enumerate(logits_TV)
    ]
