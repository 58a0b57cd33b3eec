"""The core: sequences, cache, model and sampler, stepped by one thread.

Invariant: between two steps everything is consistent, and nothing else ever runs, so
whatever comes in from outside (a request, an abort, a pause, new weights) is applied there.
Sequences join and leave the running batch at every step.

A step lets waiting sequences in, copies what the prefix cache has of their prompts, reads
one flat row of tokens (one per decoding sequence, a chunk per prompt being read), and
samples for each sequence whose ids are all read by then.

New weights under a running sequence (`InFlightPolicy.CONTINUE`): it keeps the keys and
values that the old weights computed, and its next tokens carry the new version. Nothing of
such a row serves another sequence.

Images (`vision.py`) are seen in the step that reads their place, by the vision tower; an
image whose place a prefix covers is not seen again. Sequences with and without images run
in one batch.

The core calls nobody: what the outside is to learn waits in `take_outbox`. Not thread-safe;
the compute thread owns it.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial

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
    Started,
    Tokens,
)
from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.torch.attention import RowSpan, StepLayout
from treadle.rollout_server.engines.torch.images import PlacedImage
from treadle.rollout_server.engines.torch.kv_rows import KvRows
from treadle.rollout_server.engines.torch.model import CachedModel
from treadle.rollout_server.engines.torch.prefix import PrefixCache, common_tokens
from treadle.rollout_server.engines.torch.scheduler import Scheduler, Work
from treadle.rollout_server.engines.torch.sequence import Sequence, Sink
from treadle.rollout_server.engines.torch.vision import Sight

_STEP_TOKENS = 2048
_FLUSH_S = 0.02  # Tokens wait at most so long, and cost one hand-over together.


class EngineCore:
    """See the module docstring.

    Args:
        model: What generates.
        max_num_seqs: Most sequences in one step.
        prefix_cache_bytes: For the caches of sequences that ended.
        clock: Seconds; when tokens are handed out.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        max_num_seqs: int,
        prefix_cache_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.weight_version = 0
        self.counters = EngineCounters()
        self._model = model
        self._kv = KvRows(model.kv_shape(max_rows=max_num_seqs))
        self._prefixes: PrefixCache[Sequence | torch.Tensor] = PrefixCache(prefix_cache_bytes)
        self._scheduler = Scheduler(
            max_rows=max_num_seqs, max_step_tokens=max(_STEP_TOKENS, max_num_seqs)
        )
        self._clock = clock
        self._last_flush = clock()
        self._policy: InFlightPolicy | None = None
        self._released: frozenset[MemoryKind] = frozenset()
        self._epoch = 0
        self._outbox: list[Callable[[], None]] = []
        self._drained: list[Callable[[], None]] = []
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None
        self._started = self._finished = self._aborted = 0

    @property
    def runnable(self) -> bool:
        """Whether `step` has something to do."""
        if self._policy is None:
            return bool(self._scheduler.running or self._scheduler.num_waiting)
        return self._policy is InFlightPolicy.DRAIN and bool(self._scheduler.running)

    def take_outbox(self) -> list[Callable[[], None]]:
        """What to call on the event loop, in this order; the counters already include it."""
        self.counters = EngineCounters(
            started=self._started,
            finished=self._finished,
            aborted=self._aborted,
            running=len(self._scheduler.running),
        )
        outbox, self._outbox = self._outbox, []
        return outbox

    def new_sequence(
        self, request: EngineRequest, sink: Sink, images: tuple[PlacedImage, ...] = ()
    ) -> Sequence:
        """Makes a sequence; touches no state, so any thread may call it."""
        sampling = request.sampling
        stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_ids |= self._model.info.eos_token_ids
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return Sequence(request=request, sink=sink, seed=seed, stop_ids=stop_ids, images=images)

    def submit(self, sequence: Sequence) -> None:
        """Takes a sequence on."""
        self._scheduler.submit(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forgets a sequence, whatever it was doing; nothing if it ended."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence.row is None:
            self._scheduler.withdraw(sequence)
            return
        self._aborted += 1
        self._leave(sequence)
        self._notify_drained()

    def pause(self, policy: InFlightPolicy, done: Callable[[], None]) -> None:
        """Stops sampling; `done` goes to the outbox when the policy is fulfilled."""
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
        """Goes on; what was released must be restored."""
        if self._released:
            names = ", ".join(sorted(kind.value for kind in self._released))
            raise RuntimeError(f"memory is released ({names}): restore it before resuming")
        self._policy = None

    def apply_weights(self, tensors: Iterable[NamedTensor], version: int) -> None:
        """Replaces the weights and forgets every prefix; running rows keep what they hold.

        Args:
            tensors: Those that are not written yet.
            version: What the weights are from now on.
        """
        self._flush()
        for tensor in tensors:
            self._model.write(tensor)
        self.weight_version = version
        self._epoch += 1
        self._prefixes.clear()

    def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        """Gives memory away; there must be no running sequence."""
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
        """Takes memory back; the cache takes its own when the next sequence starts."""
        self._released -= kinds
        if MemoryKind.WEIGHTS in kinds:
            self._model.restore_weights()

    def close(self) -> None:
        """Ends every sequence as INTERRUPTED, the waiting ones too."""
        self._policy = InFlightPolicy.INTERRUPT
        for sequence in list(self._scheduler.running):
            self._finish(sequence, FinishReason.INTERRUPTED)
        for sequence in self._scheduler.drain_waiting():
            self._started += 1
            self._emit(sequence, Started(0))
            self._finish(sequence, FinishReason.INTERRUPTED)
        self._notify_drained()

    def fail(self, error: BaseException) -> None:
        """Gives the error to every sequence."""
        for sequence in [*self._scheduler.running, *self._scheduler.drain_waiting()]:
            self._outbox.append(partial(sequence.sink, error))

    def step(self) -> None:
        """Runs one step; call it while `runnable`."""
        if self._policy is None:
            for sequence in self._scheduler.admit(lambda key: self._prefixes.longest(key)[0]):
                self._begin(sequence)
        work = self._scheduler.plan()
        logits_BV, sampling = self._read(work)
        if sampling:
            if self._batch is None or self._batch[0] != sampling:
                settings = [sequence.request.sampling for sequence in sampling]
                seeds = [sequence.seed for sequence in sampling]
                self._batch = sampling, SamplingBatch(settings, seeds, self._model.device)
            sampled = self._batch[1].sample(logits_BV, [sequence.ids for sequence in sampling])
            tokens = zip(sampling, sampled.token_ids, sampled.logprobs, strict=True)
            ended = [
                (sequence, reason)
                for sequence, token_id, logprob in tokens
                if (reason := self._accept(sequence, token_id, logprob)) is not None
            ]
            for sequence, reason in ended:
                self._finish(sequence, reason)
            self._notify_drained()
        if self._clock() - self._last_flush >= _FLUSH_S:
            self._flush()

    def _begin(self, sequence: Sequence) -> None:
        """Fills the row of an admitted sequence with what is known of its prompt."""
        assert sequence.row is not None
        self._kv.reserve(sequence.row + 1, len(sequence.ids))
        shared, holder = self._prefixes.longest(sequence.prompt_key)
        # The last id is always read: its logits are what is sampled from.
        cached = min(shared, len(sequence.ids) - 1)
        if cached and isinstance(holder, Sequence):
            assert holder.row is not None
            self._kv.copy_row(holder.row, sequence.row, cached)
        elif cached and isinstance(holder, torch.Tensor):
            self._kv.restore(sequence.row, holder, cached)
        sequence.num_cached = cached
        sequence.epoch = self._epoch
        self._started += 1
        self._emit(sequence, Started(cached))

    def _read(self, work: list[Work]) -> tuple[torch.Tensor, list[Sequence]]:
        """Runs the model; returns logits ``[B, vocab]`` of the sequences that sample, and them."""
        ids: list[int] = []
        spans = []
        sampling: list[Sequence] = []
        wanted: list[int] = []
        for sequence, num_ids in work:
            start = sequence.num_cached
            sequence.num_cached = start + num_ids
            spans.append(RowSpan(start, sequence.num_cached))
            ids += sequence.ids[start : sequence.num_cached]
            if not sequence.num_uncached:
                sampling.append(sequence)
                wanted.append(len(ids) - 1)
        self._kv.reserve(len(spans), max(span.stop for span in spans))
        layout = StepLayout.build(
            self._kv,
            spans,
            queries_per_head=self._model.queries_per_head,
            shared=self._shared_tokens([sequence for sequence, _ in work]),
        )
        sight = None
        if any(sequence.images for sequence, _ in work):
            sight = self._look([sequence for sequence, _ in work], spans)
        return self._model.forward(ids, layout, wanted, sight), sampling

    def _look(self, sequences: list[Sequence], spans: list[RowSpan]) -> Sight:
        """What a step sees: positions of all its ids, vectors of the images among them."""
        parts: list[torch.Tensor] = []
        vectors: list[tuple[int, torch.Tensor]] = []
        first = 0
        for sequence, span in zip(sequences, spans, strict=True):
            if sequence.positions is None:
                parts.append(torch.arange(*span).expand(3, -1))
            else:
                parts.append(sequence.positions.within(*span))
                vectors += self._vectors(sequence, span, first)
            first += span.num_tokens
        return Sight(torch.cat(parts, dim=1).to(self._model.device), vectors)

    def _vectors(
        self, sequence: Sequence, span: RowSpan, first: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts of a sequence's images within a span, and where in the step they go.

        An image that a step reads only in part is kept until the rest was read.
        """
        for placed in sequence.images:
            start, stop = max(placed.start, span.start), min(placed.stop, span.stop)
            if start >= stop:
                continue
            seen = sequence.vectors.pop(placed.start, None)
            if seen is None:
                seen = self._model.see(placed)
            if stop < placed.stop:
                sequence.vectors[placed.start] = seen
            part = seen[start - placed.start : stop - placed.start]
            yield first + start - span.start, part

    def _shared_tokens(self, sequences: list[Sequence]) -> int:
        """How many leading ids, and so cache entries, these sequences have in common."""
        if any(sequence.epoch != self._epoch for sequence in sequences):
            return 0
        keys = [sequence.prompt_key for sequence in sequences]
        return common_tokens(min(keys), max(keys))

    def _accept(self, sequence: Sequence, token_id: int, logprob: float) -> FinishReason | None:
        """Appends a sampled token; says whether it is the last."""
        if not sequence.num_sampled:
            self._scheduler.prompt_read(sequence)
            if sequence.epoch == self._epoch:
                self._prefixes.add_live(sequence.prompt_key, sequence)
        sequence.ids.append(token_id)
        sequence.unsent_ids.append(token_id)
        if sequence.request.logprobs:
            sequence.unsent_logprobs.append(logprob)
        if token_id in sequence.stop_ids:
            return FinishReason.STOP
        full = len(sequence.ids) >= self._model.info.context_length
        if full or sequence.num_sampled >= sequence.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.ended = True
        self._finished += 1
        if sequence.row is not None:
            self._leave(sequence)
        self._flush_sequence(sequence)
        self._emit(sequence, Finished(reason))

    def _leave(self, sequence: Sequence) -> None:
        """Frees the row, keeping a copy of it for later prompts that begin alike."""
        assert sequence.row is not None
        self._batch = None
        self._prefixes.remove_live(sequence.prompt_key, sequence)
        cached = sequence.num_cached
        num_bytes = cached * self._kv.shape.bytes_per_token
        if cached and sequence.epoch == self._epoch:
            key = sequence.prefix_key(cached)
            if self._prefixes.wants(key, num_bytes):
                self._prefixes.retain(key, self._kv.snapshot(sequence.row, cached), num_bytes)
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
            self._emit(sequence, Tokens(ids, logprobs, self.weight_version))
            sequence.unsent_ids.clear()
            sequence.unsent_logprobs.clear()

    def _emit(self, sequence: Sequence, event: EngineEvent) -> None:
        self._outbox.append(partial(sequence.sink, event))

    def _notify_drained(self) -> None:
        if self._drained and not self._scheduler.running:
            self._outbox += self._drained
            self._drained.clear()
