# ruff: noqa: D102  (a test's name says what it shows)
"""The model part of the engine contract: the engine computes what transformers computes.

Invariant: every expected number comes from the checkpoints, through `reference`. An engine that
keeps any part of old weights, such as a packed output head, fails.

Needs torch and transformers.
"""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import (
    TRIES,
    Output,
    Reader,
    pause_midway,
    random_prompt,
    request,
    run,
    run_all,
    stream,
    update,
)
from treadle.rollout_server.engine import Engine, EngineRequest, InFlightPolicy, Sampling

if TYPE_CHECKING:
    from treadle.conformance.contracts.reference import Reference

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 10},
    {"top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
)
"""Every filter alone, and all of them together."""


@pytest.mark.asyncio
class ModelComparison(ContractBase):
    """Whole completions and prompts; see `ContractBase`. Subclasses also define `checkpoint`.

    Attributes:
        model_tolerance: Maximum difference from transformers' log-probs in nats, for the engine's
            element type.
        compared: Number of tokens to compare per completion.
        longest_prompt: Maximum length of a prompt whose log-probs are compared, in tokens.
    """

    model_tolerance: float = 1e-4
    compared: int = 24
    longest_prompt: int = 2500

    @abstractmethod
    def checkpoint(self, which: int) -> Path:
        """Returns the Hugging Face directory of weight set 0 or 1."""

    def reference(self, which: int) -> "Reference":
        """Returns the same weights in transformers."""
        # Late: it needs torch, and the kit loads this module where there is none.
        from treadle.conformance.contracts.reference import reference

        return reference(self.checkpoint(which))

    async def test_greedy_tokens_are_those_of_transformers(self) -> None:
        async with self.engine() as engine:
            await self._is_greedy(engine, 0)
            await update(engine, self.weights(1), engine.weight_version + 1)
            await self._is_greedy(engine, 1)

    async def _is_greedy(self, engine: Engine, which: int) -> None:
        vocab_size = engine.info.model.vocab_size
        prompts = [random_prompt(length, vocab_size, seed=length) for length in (1, 7, 40)]
        wanted = [request(prompt, max_tokens=self.compared) for prompt in prompts]
        for prompt, output in zip(prompts, await run_all(engine, wanted), strict=True):
            assert len(output.token_ids) == self.compared
            # Of two ids that are as likely within the tolerance, rounding chooses.
            short = self.reference(which).shortfall(prompt, output.token_ids)
            assert short <= 2 * self.model_tolerance

    async def test_logprobs_are_those_of_transformers_before_and_after_updates(self) -> None:
        async with self.engine() as engine:
            await self._fit(engine, 0)
            await update(engine, self.weights(1), engine.weight_version + 1)
            await self._fit(engine, 1)
            await update(engine, self.weights(0), engine.weight_version + 1)
            await self._fit(engine, 0)

    async def test_logprobs_are_those_of_transformers_after_an_update_in_place(self) -> None:
        async with self.engine() as engine:
            skip_unless(self.takes_in_place(engine), "this server takes no updates in place")
            await engine.pause(InFlightPolicy.DRAIN)
            version = engine.weight_version + 1
            tensors = stream(self.weights(1))
            await engine.load_weights(tensors, version=version, in_place=True)
            await engine.resume()
            await self._fit(engine, 1)

    async def _fit(self, engine: Engine, which: int) -> None:
        """Compares all filters, run in one batch, each with its own distribution."""
        prompt = random_prompt(30, engine.info.model.vocab_size, seed=11)
        wanted = [
            request(prompt, seed=place, max_tokens=self.compared, **({"temperature": 1.0} | values))
            for place, values in enumerate(SAMPLINGS)
        ]
        for one, output in zip(wanted, await run_all(engine, wanted), strict=True):
            told = self._told(which, prompt, output, one.sampling)
            assert output.logprobs == pytest.approx(told, abs=self.model_tolerance), one.sampling

    def _told(
        self, which: int, prompt: tuple[int, ...], output: Output, sampling: Sampling
    ) -> list[float]:
        """Returns transformers' log-probs; the engine's where rounding decides if an id is kept."""
        known, ids = self.reference(which), output.token_ids
        told = known.logprobs(prompt, ids, sampling)
        if -math.inf not in told:
            return told
        loose = known.logprobs(prompt, ids, sampling, slack=2 * self.model_tolerance)
        return [
            own if dropped == -math.inf and kept > -math.inf else dropped
            for own, dropped, kept in zip(output.logprobs, told, loose, strict=True)
        ]

    async def test_logprobs_of_a_prompt_are_those_of_transformers(self) -> None:
        """Prompts are shorter and longer than a step, side by side."""
        async with self.engine() as engine:
            can, model = engine.info.capabilities, engine.info.model
            skip_unless(can.prompt_logprobs, "this engine reports no log-probs of prompts")
            longest = min(self.longest_prompt, model.context_length - 1)
            prompts = [random_prompt(n, model.vocab_size, seed=n) for n in (2, 30, longest)]
            asked = [request(prompt, max_tokens=1, prompt_logprobs_from=1) for prompt in prompts]
            outputs = await run_all(engine, asked)
        plain = request(temperature=1.0).sampling
        for prompt, output in zip(prompts, outputs, strict=True):
            told = self.reference(0).logprobs(prompt[:1], prompt[1:], plain)
            assert output.prompt_logprobs == pytest.approx(told, abs=self.model_tolerance)

    async def test_a_cached_prefix_leads_to_the_same_logprobs(self) -> None:
        async with self.engine() as engine:
            vocab_size = engine.info.model.vocab_size
            prompt = random_prompt(self.turn_tokens, vocab_size, seed=5)
            first = request(prompt, temperature=1.0, seed=1, max_tokens=self.compared)
            begun = await run(engine, first)
            turn = prompt + begun.token_ids + random_prompt(9, vocab_size, seed=6)
            wanted = replace(first, prompt=turn)
            output = await run(engine, wanted)
        assert output.cached_prompt_tokens > 0 or not self.caches_prefixes
        told = self.reference(0).logprobs(turn, output.token_ids, wanted.sampling)
        assert output.logprobs == pytest.approx(told, abs=self.model_tolerance)

    async def test_the_sets_of_weights_differ_in_every_way_that_is_compared(self) -> None:
        """Tests the test: an engine that kept its old weights would fail."""
        prompt = random_prompt(30, 32, seed=11)
        sampling = request(temperature=1.0).sampling
        ids = self.reference(0).greedy(prompt, self.compared)
        assert self.reference(1).greedy(prompt, self.compared) != ids
        old, new = (self.reference(which).logprobs(prompt, ids, sampling) for which in (0, 1))
        far = [abs(a - b) > 10 * self.model_tolerance for a, b in zip(old, new, strict=True)]
        assert sum(far) > len(far) // 2


class ModelContract(ModelComparison):
    """All of it: also which weights sampled a token when they change between two.

    Attributes:
        continue_recomputes: Whether new weights recompute the KV cache of sequences kept by
            CONTINUE; else the keys and values of the old weights stay.
    """

    continue_recomputes: bool = False

    @pytest.mark.parametrize(
        "policy", [InFlightPolicy.DRAIN, InFlightPolicy.CONTINUE], ids=["drain", "continue"]
    )
    async def test_each_token_was_sampled_by_the_version_it_is_labelled_with(
        self, policy: InFlightPolicy
    ) -> None:
        """Sequences have three lengths, side by side.

        The log-prob shows the version, because no other gives the token the same one.
        """
        async with self.engine() as engine:
            can = engine.info.capabilities.in_flight_continue
            skip_unless(can or policy is InFlightPolicy.DRAIN, "this engine cannot continue")
            base = engine.weight_version
            wanted = [
                request(
                    random_prompt(12 + place, engine.info.model.vocab_size, seed=9 + place),
                    temperature=1.0,
                    seed=5,
                    max_tokens=self.long * (place + 1) // 3,
                )
                for place in range(3)
            ]
            readers = [Reader(engine, one) for one in wanted[:-1]]
            for reader in readers:
                await reader.first_tokens()
            # The longest, which begins last, ends last.
            if policy is InFlightPolicy.CONTINUE:
                readers.append(await pause_midway(engine, wanted[-1]))
            else:
                readers.append(Reader(engine, wanted[-1]))
                await readers[-1].first_tokens()
                await engine.pause(policy)
            await engine.load_weights(stream(self.weights(1)), version=base + 1)
            await engine.resume()
            outputs = [await reader.output() for reader in readers]
        for one, output in zip(wanted, outputs, strict=True):
            assert len(output.token_ids) == one.sampling.max_tokens
            old = output.versions.count(base)
            assert output.versions == (base,) * old + (base + 1,) * (len(output.token_ids) - old)
            told = self._labelled(one.prompt, output, old)
            assert output.logprobs == pytest.approx(told, abs=self.model_tolerance)
        last = outputs[-1].versions[-1]
        assert last == (base if policy is InFlightPolicy.DRAIN else base + 1)

    def _labelled(self, prompt: tuple[int, ...], output: Output, old: int) -> list[float]:
        sampling = request(temperature=1.0).sampling
        first, second = self.reference(0), self.reference(1)
        told = first.logprobs(prompt, output.token_ids[:old], sampling)
        if old == len(output.token_ids):
            return told
        if self.continue_recomputes or not old:
            read = prompt + output.token_ids[:old]
            return told + second.logprobs(read, output.token_ids[old:], sampling)
        return told + second.continued_logprobs(
            first, prompt, output.token_ids, sampling, switched=old
        )

    async def test_a_prompt_that_is_half_read_at_an_update_is_of_one_version(self) -> None:
        """Long prompts are read one after another, so that the update finds one half read."""
        async with self.engine() as engine:
            can, model = engine.info.capabilities, engine.info.model
            skip_unless(can.in_flight_continue, "this engine cannot continue")
            length = min(900, model.context_length - 2)
            prompts = [random_prompt(length, model.vocab_size, seed=20 + n) for n in range(6)]
            asked = [
                request(
                    prompt,
                    temperature=1.0,
                    seed=place,
                    max_tokens=2,
                    # Engines that report them may read the prompt in another way.
                    prompt_logprobs_from=1 if can.prompt_logprobs and place % 2 else None,
                )
                for place, prompt in enumerate(prompts)
            ]
            base, outputs = await self._updated_while_reading(engine, asked)
        for prompt, output in zip(prompts, outputs, strict=True):
            told = self._labelled(prompt, output, output.versions.count(base))
            assert output.logprobs == pytest.approx(told, abs=self.model_tolerance)
            if output.prompt_logprobs:
                told = self._told_of_prompt(prompt, output, base)
                assert output.prompt_logprobs == pytest.approx(told, abs=self.model_tolerance)

    async def _updated_while_reading(
        self, engine: Engine, asked: Sequence[EngineRequest]
    ) -> tuple[int, list[Output]]:
        """Returns the version before an update, and what sequences yielded that it found unread.

        Raises:
            AssertionError: The engine read all prompts before the update, `TRIES` times.
        """
        for _ in range(TRIES):
            base = engine.weight_version
            readers = [Reader(engine, one) for one in asked]
            first = [asyncio.ensure_future(reader.first_tokens()) for reader in readers]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            await self.update_in_flight(engine, self.weights(1), base + 1)
            outputs = [await reader.output() for reader in readers]
            await asyncio.gather(*first)
            if any(output.versions[0] > base for output in outputs):
                return base, outputs
            await update(engine, self.weights(0), base + 2)
        raise AssertionError(f"{len(asked)} prompts were read before the pause: use longer ones")

    def _told_of_prompt(self, prompt: tuple[int, ...], output: Output, base: int) -> list[float]:
        """Returns transformers' log-probs of a prompt, each by the version of its label."""
        plain = request(temperature=1.0).sampling
        by_version = [
            self.reference(which).logprobs(prompt[:1], prompt[1:], plain) for which in (0, 1)
        ]
        return [
            by_version[version - base][place]
            for place, version in enumerate(output.prompt_versions)
        ]
