# ruff: noqa: D102  (a test's name says what it shows)
"""The sampling part of the engine contract: draws, log-probs and the end of one sequence."""

import math
from collections import Counter
from typing import Any

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import (
    FEW_CANDIDATES,
    Output,
    Reader,
    pause_midway,
    random_prompt,
    request,
    run,
    run_all,
    stream,
)
from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    EngineRequest,
    FinishReason,
    Tag,
    TaggedText,
)
from treadle.rollout_server.errors import RolloutServerError
from treadle.rollout_server.sampling_mask import decode

_COARSE_NATS = 1e-2
"""A tolerance from here on is that of logits in bfloat16, of which several may be the largest."""
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_p": 0.7},
)

_CUTS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.6}, {"min_p": 0.3})
"""Filters beside top-k, for sampling masks of a few ids."""

_ONE_TEXT = {
    ConstraintForm.JSON_SCHEMA: ('{"const": "7"}',),
    ConstraintForm.REGEX: ("7",),
    ConstraintForm.GRAMMAR: ('root ::= "7"',),
    ConstraintForm.CHOICES: ("7",),
}
"""Form -> texts; all but TAGGED, whose texts are longer."""
_THREE_TEXTS = {
    ConstraintForm.JSON_SCHEMA: ('{"enum": ["1", "2", "3"]}',),
    ConstraintForm.REGEX: ("[123]",),
    ConstraintForm.GRAMMAR: ('root ::= "1" | "2" | "3"',),
    ConstraintForm.CHOICES: ("1", "2", "3"),
}


@pytest.mark.asyncio
class SamplingContract(ContractBase):
    """See `ContractBase`."""

    async def test_greedy_repeats(self) -> None:
        async with self.engine() as engine:
            first, second = await run(engine, request()), await run(engine, request())
        assert first.token_ids == second.token_ids
        assert set(first.logprobs) == {0.0}, "at temperature 0 the distribution is one point"

    async def test_seeds_repeat_and_differ(self) -> None:
        async with self.engine() as engine:
            outputs = [
                (await run(engine, request(seed=seed, **FEW_CANDIDATES))).token_ids
                for seed in (1, 1, 2)
            ]
        assert outputs[0] == outputs[1], "the same seed gave other tokens"
        assert outputs[1] != outputs[2], "another seed gave the same tokens"

    async def test_seeds_of_64_bits_differ(self) -> None:
        async with self.engine() as engine:
            outputs = {
                (await run(engine, request(temperature=1.0, seed=seed))).token_ids
                for seed in (0, 1 << 32, 1 << 63, (1 << 64) - 1)
            }
        assert len(outputs) == 4

    async def test_unseeded_sequences_differ(self) -> None:
        async with self.engine() as engine:
            outputs = {(await run(engine, request(temperature=1.0))).token_ids for _ in range(4)}
        assert len(outputs) > 1

    async def test_a_seeded_sequence_goes_on_from_its_middle(self) -> None:
        wanted = request(seed=7, max_tokens=12, **FEW_CANDIDATES)
        async with self.engine() as engine:
            whole = await run(engine, wanted)
            for done in (1, 5, 11):
                prompt = wanted.prompt + whole.token_ids[:done]
                left = request(prompt, seed=7, max_tokens=12 - done, **FEW_CANDIDATES)
                assert (await run(engine, left)).token_ids == whole.token_ids[done:]

    async def test_logprobs_are_as_many_as_tokens_and_never_positive(self) -> None:
        async with self.engine() as engine:
            assert engine.info.capabilities.sampled_logprobs
            output = await run(engine, request(temperature=1.0, seed=3))
            bare = await run(engine, request(temperature=1.0, seed=3, logprobs=False))
        assert len(output.logprobs) == len(output.token_ids) == 16
        assert all(logprob <= 0.0 for logprob in output.logprobs)
        assert any(logprob < 0.0 for logprob in output.logprobs)
        assert bare.logprobs == () and bare.token_ids == output.token_ids

    async def test_logprobs_of_a_prompt_are_those_with_which_it_was_sampled(self) -> None:
        """Also of ids whose keys and values are cached, and whatever the request samples with."""
        async with self.engine() as engine:
            can = engine.info.capabilities.prompt_logprobs
            skip_unless(can, "this engine reports no log-probs of prompts")
            prompt = random_prompt(self.turn_tokens, engine.info.model.vocab_size, seed=3)
            sampled = await run(engine, request(prompt, temperature=1.0, seed=3))
            whole = prompt + sampled.token_ids
            firsts = (len(prompt), 1, len(whole) - 1, len(whole))
            asked = [request(whole, max_tokens=1, prompt_logprobs_from=n) for n in firsts]
            outputs = [await run(engine, one) for one in asked]
            outputs += await run_all(engine, [*asked, request(whole)])  # Beside one without.
        outputs, plain = outputs[:-1], outputs[-1]
        assert plain.prompt_logprobs == ()
        for first, output in zip(firsts * 2, outputs, strict=True):
            assert len(output.prompt_logprobs) == len(whole) - first
            told = output.prompt_logprobs[-len(sampled.logprobs) :] if first < len(whole) else ()
            expected = sampled.logprobs[len(sampled.logprobs) - len(told) :]
            assert told == pytest.approx(expected, abs=self.logprob_tolerance), first
            assert output.token_ids == plain.token_ids[:1]

    @pytest.mark.parametrize("form", _ONE_TEXT)
    async def test_logprobs_are_those_of_the_constrained_distribution(
        self, form: ConstraintForm
    ) -> None:
        """Tokens without an alternative have 0; those of a choice add up to 1 over the choices.

        The texts are single ASCII characters, which every vocabulary has as one token each; then
        only the end may follow. That of a JSON Schema has quotes, which a token may join.
        """
        async with self.engine() as engine:
            can = engine.info.capabilities.constrained_sampling
            skip_unless(can, "this engine does not constrain the sampling")

            def asked(texts: tuple[str, ...], seed: int) -> EngineRequest:
                constraint = Constraint(form=form, texts=texts)
                return request(constraint=constraint, temperature=1.0, seed=seed, ignore_eos=False)

            one = await run(engine, asked(_ONE_TEXT[form], 0))
            many = await run_all(engine, (asked(_THREE_TEXTS[form], seed) for seed in range(24)))
        if form is not ConstraintForm.JSON_SCHEMA:
            assert len(one.token_ids) == 2
            assert one.logprobs == pytest.approx((0.0, 0.0), abs=self.logprob_tolerance)
        assert one.reason is FinishReason.STOP
        assert one.token_ids[-1] in engine.info.model.eos_token_ids
        drawn = {output.token_ids: sum(output.logprobs) for output in many}
        assert len(drawn) <= 3 or form is ConstraintForm.JSON_SCHEMA
        total = sum(math.exp(logprob) for logprob in drawn.values())
        assert total <= 1 + 1e-3
        if len(drawn) == 3 and form is not ConstraintForm.JSON_SCHEMA:
            assert total == pytest.approx(1.0, abs=1e-3)

    async def test_required_tags_are_all_that_is_sampled(self) -> None:
        """Two texts differ in one character; the probabilities of both add up to 1."""
        tagged = TaggedText(
            tags=tuple(Tag(begin=f"<{n}", json_schema='{"const": 7}', end=">") for n in "12"),
            trigger="<",
            required=True,
            single=True,
        )
        constraint = Constraint(form=ConstraintForm.TAGGED, tagged=tagged)
        async with self.engine() as engine:
            can = engine.info.capabilities.constrained_sampling
            skip_unless(can, "this engine does not constrain the sampling")
            asked = [
                request(constraint=constraint, temperature=1.0, seed=seed, ignore_eos=False)
                for seed in range(24)
            ]
            outputs = await run_all(engine, asked)
        drawn = {output.token_ids: sum(output.logprobs) for output in outputs}
        assert {output.reason for output in outputs} == {FinishReason.STOP}
        total = sum(math.exp(logprob) for logprob in drawn.values())
        assert total <= 1 + 1e-3
        assert max(len(ids) for ids in drawn) <= len("<17>") + 1

    async def test_a_constraint_that_nothing_can_read_ends_only_its_own_sequence(self) -> None:
        async with self.engine() as engine:
            can = engine.info.capabilities.constrained_sampling
            skip_unless(can, "this engine does not constrain the sampling")
            wrong = Constraint(form=ConstraintForm.GRAMMAR, texts=("this is no grammar",))
            beside = Reader(engine, request())
            for _ in range(2):  # An engine may know the second one from the first.
                with pytest.raises(RolloutServerError, match="constraint"):
                    await run(engine, request(constraint=wrong))
            output = await beside.output()
            later = await run(engine, request())
        assert output.token_ids == later.token_ids

    async def test_a_constraint_holds_over_an_update(self) -> None:
        async with self.engine() as engine:
            can = engine.info.capabilities
            both = can.constrained_sampling and can.in_flight_continue
            skip_unless(both, "this engine does not constrain the sampling over an update")
            # No text of it has the same rest twice.
            digits = "".join(map(str, range(100, 100 + min(50, self.long // 3))))
            constraint = Constraint(form=ConstraintForm.REGEX, texts=(digits,))
            most = len(digits) - 1
            asked = request(constraint=constraint, temperature=1.0, seed=1, max_tokens=most)
            reader = await pause_midway(engine, asked)
            version = engine.weight_version + 1
            await engine.load_weights(stream(self.weights(0)), version=version)
            await engine.resume()
            output, plain = await reader.output(), await run(engine, asked)
        assert output.token_ids == plain.token_ids
        assert output.logprobs == pytest.approx(plain.logprobs, abs=self.logprob_tolerance)

    @pytest.mark.parametrize("sampling", _SAMPLINGS, ids=["top_k", "cool", "hot top_p"])
    async def test_draws_follow_the_distribution_that_is_reported(
        self, sampling: dict[str, Any]
    ) -> None:
        """The frequency of each id matches its log-prob within six standard deviations."""
        async with self.engine() as engine:
            outputs = await run_all(
                engine,
                (request(max_tokens=1, seed=seed, **sampling) for seed in range(self.draws)),
            )
        counts = Counter(output.token_ids[0] for output in outputs)
        logprobs = self._one_logprob_each(outputs)
        told = {token_id: math.exp(logprob) for token_id, logprob in logprobs.items()}
        assert sum(told.values()) <= 1 + self.logprob_tolerance * len(told), told
        for token_id, probability in told.items():
            expected = self.draws * probability
            spread = 6 * math.sqrt(expected * (1 - min(probability, 1.0))) + 1
            assert abs(counts[token_id] - expected) <= spread, (
                f"id {token_id} was drawn {counts[token_id]} times of {self.draws} and its "
                f"log-prob promises {expected:.1f}"
            )
        unseen = self.draws * (1 - sum(told.values()))
        # Ids that were never drawn may hold only a small part of the probability.
        assert unseen <= 6 * math.sqrt(self.draws), f"{unseen:.0f} draws are missing"

    def _one_logprob_each(self, outputs: list[Output]) -> dict[int, float]:
        found: dict[int, float] = {}
        for output in outputs:
            known = found.setdefault(output.token_ids[0], output.logprobs[0])
            assert output.logprobs[0] == pytest.approx(known, abs=self.logprob_tolerance), (
                f"id {output.token_ids[0]} has two log-probs after one prompt"
            )
        return found

    async def test_a_logprob_is_that_among_the_ids_of_its_sampling_mask(self) -> None:
        """Against the log-probs of these ids in prompts, which are of the whole vocabulary."""
        async with self.engine() as engine:
            can, vocab_size = engine.info.capabilities, engine.info.model.vocab_size
            skip_unless(can.sampling_mask, "this engine reports no sampling masks")
            skip_unless(can.prompt_logprobs, "this engine reports no log-probs of prompts")
            prompt = random_prompt(30, vocab_size, seed=11)
            masked = [
                request(prompt, seed=n, temperature=1.0, top_k=12, sampling_mask=True, **more)
                for n, more in enumerate(_CUTS)
            ]
            greedy, plain = request(prompt, sampling_mask=True), request(prompt)
            *outputs, greedy_output, _ = await run_all(engine, [*masked, greedy, plain])
            assert set(greedy_output.sampling_masks) == {b""}
            several = 0
            for one, output in zip(masked, outputs, strict=True):
                for place in (0, len(output.token_ids) - 1):
                    drawn = output.token_ids[place]
                    kept = decode(output.sampling_masks[place], drawn, vocab_size)
                    assert len(kept) <= 12 and max(kept) < vocab_size, kept
                    before = (*one.prompt, *output.token_ids[:place])
                    asked = [
                        request((*before, each), max_tokens=1, prompt_logprobs_from=len(before))
                        for each in sorted(kept)
                    ]
                    whole = [each.prompt_logprobs[0] for each in await run_all(engine, asked)]
                    mass = math.log(sum(map(math.exp, whole)))
                    told = whole[sorted(kept).index(drawn)] - mass
                    assert output.logprobs[place] == pytest.approx(
                        told, abs=2 * self.logprob_tolerance
                    ), f"{one.sampling}: {sorted(kept)}"
                    several += len(kept) > 1
            assert several, "no mask has two ids"

    async def test_top_k_bounds_the_ids_drawn(self) -> None:
        wanted = [request(max_tokens=1, temperature=3.0, top_k=3, seed=s) for s in range(64)]
        async with self.engine() as engine:
            outputs = await run_all(engine, wanted)
        assert 1 < len({output.token_ids for output in outputs}) <= 3

    async def test_top_k_of_one_is_greedy(self) -> None:
        exact = self.logprob_tolerance < _COARSE_NATS
        skip_unless(exact, "several ids may be the likeliest where logits are rounded")
        async with self.engine() as engine:
            greedy = await run(engine, request())
            narrow = await run(engine, request(temperature=1.0, top_k=1, seed=1))
            least = await run(engine, request(temperature=1.0, top_p=1e-6, seed=1))
            floor = await run(engine, request(temperature=1.0, min_p=1.0, seed=1))
        for output in (narrow, least, floor):
            assert output.token_ids == greedy.token_ids
            assert output.logprobs == pytest.approx([0.0] * 16, abs=1e-6)

    async def test_a_repetition_penalty_turns_away_from_what_was_seen(self) -> None:
        async with self.engine() as engine:
            favourite = (await run(engine, request(max_tokens=1))).token_ids[0]
            prompt = (favourite, *request().prompt)
            plain = await run(engine, request(prompt, max_tokens=self.long))
            wanted = request(prompt, max_tokens=self.long, repetition_penalty=1e9)
            penalised = await run(engine, wanted)
        assert len(set(penalised.token_ids)) >= len(set(plain.token_ids))

    async def test_max_tokens_ends_with_length(self) -> None:
        async with self.engine() as engine:
            for most in (1, 5):
                output = await run(engine, request(max_tokens=most))
                assert (len(output.token_ids), output.reason) == (most, FinishReason.LENGTH)

    async def test_a_completion_may_fill_the_context(self) -> None:
        async with self.engine() as engine:
            model = engine.info.model
            prompt = random_prompt(model.context_length - 5, model.vocab_size, seed=1)
            output = await run(engine, request(prompt, max_tokens=5))
        assert (len(output.token_ids), output.reason) == (5, FinishReason.LENGTH)

    async def test_a_stop_id_is_the_last_token(self) -> None:
        async with self.engine() as engine:
            free = (await run(engine, request())).token_ids
            stop = free[7]
            output = await run(engine, request(stop_token_ids=frozenset({stop})))
        assert output.token_ids == free[: free.index(stop) + 1]
        assert output.reason is FinishReason.STOP

    async def test_a_stop_id_at_the_last_place_is_a_stop(self) -> None:
        async with self.engine() as engine:
            free = (await run(engine, request())).token_ids
            most = free.index(free[7]) + 1
            wanted = request(stop_token_ids=frozenset({free[7]}), max_tokens=most)
            output = await run(engine, wanted)
        assert (output.token_ids, output.reason) == (free[:most], FinishReason.STOP)

    async def test_a_stop_id_of_the_prompt_stops_nothing(self) -> None:
        async with self.engine() as engine:
            free = (await run(engine, request())).token_ids
            unused = next(i for i in request().prompt if i not in free)
            output = await run(engine, request(stop_token_ids=frozenset({unused})))
        assert (output.token_ids, output.reason) == (free, FinishReason.LENGTH)

    async def test_end_of_sequence_stops_unless_ignored(self) -> None:
        async with self.engine() as engine:
            eos = engine.info.model.eos_token_ids
            wild: dict[str, Any] = {"temperature": 100.0, "max_tokens": 64}
            ends = [request(seed=seed, ignore_eos=False, **wild) for seed in range(8)]
            outputs = await run_all(engine, ends)
            past = await run_all(engine, (request(seed=seed, **wild) for seed in range(8)))
        for output, ignoring in zip(outputs, past, strict=True):
            assert not eos.intersection(output.token_ids[:-1])
            stopped = output.token_ids[-1] in eos
            assert (output.reason is FinishReason.STOP) == stopped
            assert ignoring.token_ids[: len(output.token_ids)] == output.token_ids
            assert (len(ignoring.token_ids), ignoring.reason) == (64, FinishReason.LENGTH)
