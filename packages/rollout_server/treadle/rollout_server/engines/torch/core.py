"""The engine core: sequences, KV cache, model and sampler, stepped by one thread.

Invariant: the state is consistent between two steps, and all external input (a request, an
abort, a pause, new weights) is applied only there. Sequences join and leave the running batch
at every step.

A step admits waiting sequences, copies the cached prefixes of their prompts, runs the model on
one flat row of tokens (one per decoding sequence and those of its draft, a chunk per prompt in
prefill), and samples for each sequence whose ids are then all in the cache: one token, and one
more for each token of its draft that equals the one sampled in its place (`drafter.py`). The keys
and values of other drafted tokens stay beyond the row's length until they are overwritten. Where
the log-probabilities of a prompt are wanted, each chunk reports those of the ids that its rows
predict, and no cached prefix covers such a row.

When weights change under a running sequence (`InFlightPolicy.CONTINUE`), it keeps the keys and
values that the old weights computed, and its next tokens carry the new version. Such a row is
never shared with another sequence. A sequence without a token yet reads its prompt again, because
no token's version would show that the old weights read a part of it.

A model with experts reports those that it chose for each row. They are kept with the keys and
values, so that a row that is copied from the prefix cache has the experts that made it.

The vision tower encodes an image (`vision.py`) in the step that reads its placeholders; an
image that a cached prefix covers is not encoded again. Sequences with and without images run
in one batch.

The core calls nothing outside: callbacks for the event loop wait in `take_outbox`. Not
thread-safe; the compute thread owns it.
"""

import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from treadle.rollout_server.engine import (
    EngineCounters,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    PromptLogprobs,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.common.sampling import logprobs_of
from treadle.rollout_server.engines.images.reader import PlacedImage
from treadle.rollout_server.engines.torch.attention import RowSpan, StepLayout
from treadle.rollout_server.engines.torch.drafter import Drafter
from treadle.rollout_server.engines.torch.kv_cache import KvCache
from treadle.rollout_server.engines.torch.model import CachedModel
from treadle.rollout_server.engines.torch.prefix_cache import PrefixCache, common_tokens
from treadle.rollout_server.engines.torch.scheduler import ScheduledIds, Scheduler
from treadle.rollout_server.engines.torch.sequence import Sequence, Sink
from treadle.rollout_server.engines.torch.step_sampler import Drawn, StepSampler
from treadle.rollout_server.engines.torch.vision import vision_inputs

_STEP_TOKENS = 2048
_FLUSH_S = 0.02  # Maximum wait of a token; tokens are emitted in groups to save callbacks.


class _Retained(NamedTuple):
    """The part of a row that is kept after its sequence has ended."""

    kv: torch.Tensor
    routed_experts: bytes


class EngineCore:
    """See the module docstring.

    Args:
        max_num_seqs: Maximum number of sequences in one step.
        prefix_cache_bytes: Maximum memory for prefixes of sequences that ended.
        max_draft_tokens: Maximum number of tokens that a pass drafts per sequence.
        batch_invariant: Whether the bits of a token's results must not depend on what else a step
            computes. With drafts they do not where that is possible, experts apart.
        clock: Returns seconds; decides when tokens are emitted.

    Raises:
        ValueError: Drafts are wanted of a model whose state cannot be cut to a prefix, or
            independence of the batch of one that does not have it.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        max_num_seqs: int,
        prefix_cache_bytes: int,
        max_draft_tokens: int,
        batch_invariant: bool,
        clock: Callable[[], float],
    ) -> None:
        self.weight_version = 0
        self.counters = EngineCounters()
        self._model = model
        if batch_invariant and (why := model.why_not_exact):
            raise ValueError(f"model.batch_invariant: {why} (docs/speculation.md): leave it out")
        is_exact = batch_invariant or (max_draft_tokens > 0 and model.can_be_exact)
        self._kv = model.new_cache(max_rows=max_num_seqs, is_exact=is_exact)
        self._prefixes: PrefixCache[Sequence | _Retained] = PrefixCache(prefix_cache_bytes)
        self._scheduler = Scheduler(
            max_rows=max_num_seqs, max_step_tokens=max(_STEP_TOKENS, max_num_seqs)
        )
        self._drafter: Drafter | None = None
        if max_draft_tokens:
            if not isinstance(self._kv, KvCache):
                raise ValueError(
                    "model.max_draft_tokens: this model has a state that cannot be cut back to "
                    "the tokens that were sampled (docs/speculation.md): leave it 0"
                )
            self._drafter = Drafter(max_draft_tokens)
        self._sampler = StepSampler(model.device)
        self._clock = clock
        self._last_flush = clock()
        self._policy: InFlightPolicy | None = None
        self._released: frozenset[MemoryKind] = frozenset()
        self._epoch = 0
        self._outbox: list[Callable[[], None]] = []
        self._drained: list[Callable[[], None]] = []
        self._started = self._finished = self._aborted = self._passes = 0

    @property
    def runnable(self) -> bool:
        """Whether `step` has work."""
        if self._policy is None:
            return bool(self._scheduler.running or self._scheduler.num_waiting)
        return self._policy is InFlightPolicy.DRAIN and bool(self._scheduler.running)

    def take_outbox(self) -> list[Callable[[], None]]:
        """Returns the callbacks for the event loop, in order; updates the counters first."""
        self.counters = EngineCounters(
            started=self._started,
            finished=self._finished,
            aborted=self._aborted,
            running=len(self._scheduler.running),
            passes=self._passes,
            drafted=0 if self._drafter is None else self._drafter.num_drafted,
            accepted=0 if self._drafter is None else self._drafter.num_accepted,
        )
        outbox, self._outbox = self._outbox, []
        return outbox

    def new_sequence(
        self, request: EngineRequest, sink: Sink, images: tuple[PlacedImage, ...] = ()
    ) -> Sequence:
        """Creates a sequence; changes no state, so any thread may call it."""
        sampling = request.sampling
        stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_ids |= self._model.info.eos_token_ids
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return Sequence(request=request, sink=sink, seed=seed, stop_ids=stop_ids, images=images)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._scheduler.submit(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Aborts a sequence, waiting or running; does nothing if it has ended."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence.row is None:
            self._scheduler.withdraw(sequence)
            return
        self._aborted += 1
        self._free_row(sequence)
        self._notify_drained()

    def pause(self, policy: InFlightPolicy, done: Callable[[], None]) -> None:
        """Stops sampling; puts `done` into the outbox once the policy is fulfilled."""
        self._policy = policy
        if policy is InFlightPolicy.INTERRUPT:
            for sequence in list(self._scheduler.running):
                self._finish(sequence, FinishReason.INTERRUPTED)
        self._flush()
        if policy is InFlightPolicy.CONTINUE:
            self._outbox.append(done)
        else:
            self._drained.append(done)
            self._notify_drained()

    def resume(self) -> None:
        """Resumes sampling.

        Raises:
            RuntimeError: Memory is still released.
        """
        if self._released:
            names = ", ".join(sorted(kind.value for kind in self._released))
            raise RuntimeError(f"memory is released ({names}): restore it before resuming")
        self._policy = None

    def apply_weights(self, tensors: Iterable[NamedTensor], version: int) -> None:
        """Replaces the weights and clears the prefix cache.

        Rows with sampled ids keep their contents.

        Args:
            tensors: Tensors that are not written yet.
            version: Version of the new weights.
        """
        self._flush()
        for tensor in tensors:
            self._model.write(tensor)
        self.weight_version = version
        self._epoch += 1
        self._prefixes.clear()
        for sequence in self._scheduler.running:
            if not sequence.num_sampled:
                sequence.read_again(self._epoch)

    def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases memory.

        Raises:
            RuntimeError: A sequence is running.
        """
        if self._scheduler.running:
            raise RuntimeError(
                f"{len(self._scheduler.running)} sequences are in flight: pause with DRAIN or "
                "INTERRUPT before releasing memory"
            )
        self._released |= kinds
        if MemoryKind.KV_CACHE in kinds:
            self._prefixes.clear()
            self._kv.release()
        if MemoryKind.WEIGHTS in kinds:
            self._model.release_weights()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores memory; the KV cache is allocated when the next sequence starts."""
        self._released -= kinds
        if MemoryKind.WEIGHTS in kinds:
            self._model.restore_weights()

    def close(self) -> None:
        """Ends every sequence as INTERRUPTED, including waiting ones."""
        self._policy = InFlightPolicy.INTERRUPT
        for sequence in list(self._scheduler.running):
            self._finish(sequence, FinishReason.INTERRUPTED)
        for sequence in self._scheduler.drain_waiting():
            self._started += 1
            self._emit(sequence, Started(0))
            self._finish(sequence, FinishReason.INTERRUPTED)
        self._notify_drained()

    def fail(self, error: BaseException) -> None:
        """Sends the error to every sequence."""
        for sequence in [*self._scheduler.running, *self._scheduler.drain_waiting()]:
            self._outbox.append(partial(sequence.sink, error))

    def step(self) -> None:
        """Runs one step. Requires `runnable`."""
        admitted: list[tuple[Sequence, int]] = []
        if self._policy is None:
            for sequence in self._scheduler.admit(lambda key: self._prefixes.longest(key)[0]):
                self._start(sequence)
                admitted.append((sequence, sequence.num_cached))
        if self._drafter is not None:
            self._propose(self._drafter)
        logits_BV, rows, reports = self._forward(self._scheduler.plan())
        for sequence, cached in admitted:  # The event loop gets nothing before the step's end.
            self._emit(sequence, Started(cached, self._clock() - sequence.started_at))
        for sequence, report in reports:
            self._emit(sequence, report)
        if rows:
            ended = [
                (sequence, reason)
                for sequence, drawn in self._sampler.draw(rows, logits_BV)
                if (reason := self._append(sequence, drawn)) is not None
            ]
            for sequence, reason in ended:
                self._finish(sequence, reason)
            self._notify_drained()
        if self._clock() - self._last_flush >= _FLUSH_S:
            self._flush()

    def _start(self, sequence: Sequence) -> None:
        """Copies the longest cached prefix of the prompt into the row of an admitted sequence."""
        assert sequence.row is not None
        self._kv.reserve(sequence.row + 1, len(sequence.ids))
        shared, holder = self._prefixes.longest(sequence.prompt_key)
        # The last id is always read: the first token is sampled from its logits.
        cached = min(shared, len(sequence.ids) - 1)
        if sequence.request.prompt_logprobs_from is not None:
            cached = min(cached, sequence.request.prompt_logprobs_from - 1)
        if cached and isinstance(holder, Sequence):
            assert holder.row is not None
            self._kv.copy_row(holder.row, sequence.row, cached)
        elif cached and isinstance(holder, _Retained):
            assert isinstance(self._kv, KvCache)
            self._kv.restore(sequence.row, holder.kv, cached)
        if cached and holder is not None:
            sequence.routed_experts += holder.routed_experts[: cached * self._model.row_bytes]
        sequence.num_cached = cached
        if self._drafter is not None:  # Whoever has read a prefix has entered it.
            sequence.drafting = self._drafter.begin(sequence.ids, cached)
        sequence.epoch = self._epoch
        sequence.started_at = self._clock()
        self._started += 1

    def _propose(self, drafter: Drafter) -> None:
        """Sets the draft of every running sequence, out of what prompts leave of a step."""
        running = self._scheduler.running
        spare = self._scheduler.max_step_tokens - sum(one.num_uncached for one in running)
        room = max(spare, 0) // max(len(running), 1)
        for sequence in running:
            assert sequence.drafting is not None
            left = _left(sequence, self._model.info.context_length)
            drafter.propose(sequence.drafting, min(room, left - 1))

    def _forward(
        self, work: list[ScheduledIds]
    ) -> tuple[torch.Tensor, list[Sequence], list[tuple[Sequence, PromptLogprobs]]]:
        """Runs the model.

        Returns:
            Logits ``[B, vocab]``, the sequence of each, once per token of its draft and once more,
            and what is wanted of prompts.
        """
        ids: list[int] = []
        spans = []
        rows: list[Sequence] = []
        wanted: list[int] = []
        scored: list[tuple[Sequence, range]] = []  # Positions of ids that rows of the step predict.
        scored_rows: list[int] = []
        for sequence, num_ids in work:
            start = sequence.num_cached
            spans.append(RowSpan(start, start + num_ids))
            num_drafted = start + num_ids - len(sequence.ids)
            sequence.num_cached = min(start + num_ids, len(sequence.ids))
            if positions := _scored_positions(sequence, spans[-1]):
                scored.append((sequence, positions))
                sequence.num_scored = positions.stop
                scored_rows += [len(ids) + position - 1 - start for position in positions]
            ids += sequence.ids[start : sequence.num_cached]
            if num_drafted >= 0:
                del sequence.draft[num_drafted:]
                ids += sequence.draft
                rows += [sequence] * (1 + num_drafted)
                wanted += range(len(ids) - 1 - num_drafted, len(ids))
        self._kv.reserve(len(spans), max(span.stop for span in spans))
        if isinstance(self._kv, KvCache):
            logits_BV = self._run(ids, work, spans, wanted + scored_rows, self._kv)
        else:
            logits_BV = self._model.forward_rows(ids, spans, wanted + scored_rows, self._kv)
        reports = _reports(scored, logits_BV[len(wanted) :], self.weight_version)
        if routed := self._model.take_routed_experts():
            first = 0
            for sequence, num_ids in work:
                last = first + num_ids * self._model.row_bytes
                sequence.routed_experts += routed[first:last]
                first = last
        return logits_BV[: len(wanted)], rows, reports

    def _run(
        self,
        ids: list[int],
        work: list[ScheduledIds],
        spans: list[RowSpan],
        wanted: list[int],
        kv: KvCache,
    ) -> torch.Tensor:
        """Runs the model on one flat row; returns the wanted logits."""
        sequences = [sequence for sequence, _ in work]
        layout = StepLayout.build(
            kv,
            spans,
            queries_per_head=self._model.queries_per_head,
            shared=_shared_tokens(sequences, self._epoch),
        )
        images = None
        if any(sequence.images for sequence in sequences):
            images = vision_inputs(sequences, spans, self._model.encode_image, self._model.device)
        return self._model.forward(ids, layout, wanted, images)

    def _append(self, sequence: Sequence, drawn: list[Drawn]) -> FinishReason | None:
        """Appends the tokens of a pass; returns the finish reason if one is the last."""
        if not sequence.num_sampled:
            sequence.prefill_s = self._clock() - sequence.started_at
            self._scheduler.prefill_done(sequence)
            if sequence.epoch == self._epoch and self._kv.shares_prefixes:
                self._prefixes.add_live(sequence.prompt_key, sequence)
        self._passes += 1
        first = len(sequence.ids)
        reason = None
        for token_id, logprob, mask in drawn:
            sequence.ids.append(token_id)
            sequence.unsent_ids.append(token_id)
            if sequence.request.logprobs:
                sequence.unsent_logprobs.append(logprob)
            if sequence.request.sampling_mask:
                sequence.unsent_masks.append(mask)
            if token_id in sequence.stop_ids:
                reason = FinishReason.STOP
            elif _left(sequence, self._model.info.context_length) <= 0:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        sequence.num_cached = len(sequence.ids) - 1
        del sequence.routed_experts[sequence.num_cached * self._model.row_bytes :]
        if self._drafter is not None and sequence.drafting is not None:
            self._drafter.observe(sequence.drafting, sequence.ids[first:])
        return reason

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.ended = True
        self._finished += 1
        if sequence.row is not None:
            self._free_row(sequence)
        self._flush_sequence(sequence)
        self._emit(sequence, Finished(reason, sequence.prefill_s))

    def _free_row(self, sequence: Sequence) -> None:
        """Frees the row; retains a copy for later prompts with the same prefix."""
        assert sequence.row is not None
        self._sampler.forget()
        self._prefixes.remove_live(sequence.prompt_key, sequence)
        cached = sequence.num_cached
        if cached and sequence.epoch == self._epoch and isinstance(self._kv, KvCache):
            num_bytes = cached * (self._kv.shape.bytes_per_token + self._model.row_bytes)
            key = sequence.prefix_key(cached)
            if self._prefixes.wants(key, num_bytes):
                kv = self._kv.snapshot(sequence.row, cached)
                retained = _Retained(kv, bytes(sequence.routed_experts))
                self._prefixes.retain(key, retained, num_bytes)
        for move in self._scheduler.remove(sequence):
            length = self._scheduler.running[move.target].num_cached
            self._kv.copy_row(move.source, move.target, length)

    def _flush(self) -> None:
        self._last_flush = self._clock()
        for sequence in self._scheduler.running:
            self._flush_sequence(sequence)

    def _flush_sequence(self, sequence: Sequence) -> None:
        if sequence.unsent_ids:
            ids, logprobs = tuple(sequence.unsent_ids), tuple(sequence.unsent_logprobs)
            routed = self._unsent_routed(sequence)
            masks = tuple(sequence.unsent_masks)
            self._emit(sequence, Tokens(ids, logprobs, self.weight_version, routed, masks))
            sequence.unsent_ids.clear()
            sequence.unsent_logprobs.clear()
            sequence.unsent_masks.clear()

    def _unsent_routed(self, sequence: Sequence) -> bytes:
        if sequence.request.routed_experts_from is None:
            return b""
        first, sequence.num_routed_sent = sequence.num_routed_sent, sequence.num_cached
        row_bytes = self._model.row_bytes
        return bytes(sequence.routed_experts[first * row_bytes : sequence.num_cached * row_bytes])

    def _emit(self, sequence: Sequence, event: EngineEvent) -> None:
        self._outbox.append(partial(sequence.sink, event))

    def _notify_drained(self) -> None:
        if self._drained and not self._scheduler.running:
            self._outbox += self._drained
            self._drained.clear()


def _scored_positions(sequence: Sequence, span: RowSpan) -> range:
    """Returns the positions of wanted ids of the prompt that the rows of a span predict."""
    if sequence.num_scored is None:
        return range(0)
    first = max(span.start + 1, sequence.num_scored)
    return range(first, min(span.stop + 1, len(sequence.request.prompt)))


def _shared_tokens(sequences: list[Sequence], epoch: int) -> int:
    """Returns the number of leading ids, and so cache entries, that sequences share."""
    if any(sequence.epoch != epoch for sequence in sequences):
        return 0
    keys = [sequence.prompt_key for sequence in sequences]
    return common_tokens(min(keys), max(keys))


def _left(sequence: Sequence, context_length: int) -> int:
    """Returns how many tokens a sequence may still sample."""
    room = context_length - len(sequence.ids)
    return min(room, sequence.request.sampling.max_tokens - sequence.num_sampled)


def _reports(
    scored: list[tuple[Sequence, range]], logits_RV: torch.Tensor, weight_version: int
) -> list[tuple[Sequence, PromptLogprobs]]:
    """Returns the log-probabilities of ids of prompts, whose logits these are."""
    found = []
    first = 0
    for sequence, positions in scored:
        last = first + len(positions)
        logprobs = logprobs_of(
            logits_RV[first:last], sequence.ids[positions.start : positions.stop]
        )
        found.append((sequence, PromptLogprobs(logprobs, weight_version)))
        first = last
    return found
