"""The policies: one per shape of adapters, each with the states of many models in turn.

A policy of the contract has one adapter and one optimizer. A model of the service is a state in a
directory, and the gradients that came since; the policy takes it up when the model trains.

Invariants:

1. Whoever uses a policy has its lock, and says first which state it needs.
2. A policy that is lost is started again when it is needed, and its states are read again. The
   gradients of a model that came after its state are computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from treadle.policy.client.group import PolicyError, PolicyGroup
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.policy import LoraConfig
from treadle.policy.v1 import rank_service_pb2 as rank_pb
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import LoadRequest, SaveRequest
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.serve.batches import PolicyPass
from treadle.serve.errors import ServiceError
from treadle.serve.store import Store
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_group import policy_group
from treadle.trainer.launch.process import ProcessError
from treadle.trainer.plan import policy_threads
from treadle.trainer.rollout.server_security import server_security

__all__ = ["Policies", "Policy", "Shape"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_SILENT_S: Final = 120.0
"""How long a client has given no heartbeat when its models may wait for their ranks to restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What models must share to be trained by one policy.

    Attributes:
        rank: Rank of the adapters; 0: there are none, and all weights are trained.
        targets: Matrices with an adapter, by commas.
    """

    rank: int
    targets: str

    @property
    def text(self) -> str:
        """The shape as it is kept; `Shape.read` reads it."""
        return f"{self.rank}/{self.targets}"

    @classmethod
    def read(cls, text: str) -> Shape:
        """Returns the shape of a text."""
        rank, targets = text.split("/")
        return cls(rank=int(rank), targets=targets)


class Policy:
    """The ranks that train the models of one shape."""

    def __init__(self, config: Config, shape: Shape, store: Store, *, number: int) -> None:
        """Starts nothing yet.

        Args:
            config: With the tokens and certificates of the rollout servers.
        """
        lora = config.policy.lora
        if shape.rank:
            lora = LoraConfig.model_validate(
                {"rank": shape.rank, "alpha": lora.alpha, "targets": shape.targets.split(",")}
            )
        policy = config.policy.model_copy(update={"lora": lora})
        self.lock = asyncio.Lock()
        self.shape = shape
        self._config = config.model_copy(update={"policy": policy})
        self._seed = 0
        self._store = store
        self._number = number
        self._starts = 0
        self._stack = AsyncExitStack()
        self._group: PolicyGroup | None = None
        self._publisher: WeightPublisher | None = None
        self._content = ""
        self._gradients: tuple[str, ...] = ()

    def initial(self, seed: int | None = None) -> str | None:
        """Returns the state that models begin with, once there is one.

        Args:
            seed: Seed of the adapters' first values; None: any.
        """
        row = self._store.row(
            "SELECT id FROM contents WHERE initial AND shape = ? AND seed = IFNULL(?, seed)",
            *(self.shape.text, seed),
        )
        return None if row is None else str(row["id"])

    async def close(self) -> None:
        """Ends the ranks; the next use starts them again."""
        self._group, self._publisher, self._content, self._gradients = None, None, "", ()
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    async def use(
        self,
        work: Callable[[], Awaitable[T]],
        content: str | None = None,
        gradients: Sequence[tuple[str, PolicyPass]] | None = None,
    ) -> T:
        """Returns what `work` returns, with the lock held and the ranks started; again if lost.

        Args:
            content: State that is taken up before the work; None: the work does it.
            gradients: Batches whose gradients came after the state, as `take_up` takes them.

        Raises:
            ServiceError: The ranks do not start, or cannot do the work.
        """
        async with self.lock:
            for attempt in (1, 2):
                try:
                    if self._group is None:
                        await self._start()
                    if content is not None:
                        await self.take_up(content, gradients)
                    return await work()
                except (PolicyError, ProcessError) as error:
                    await self.close()
                    lost = isinstance(error, PolicyError) and error.lost
                    if attempt == 2 or not lost:
                        of_user = isinstance(error, PolicyError) and error.from_input
                        raise ServiceError(
                            str(error), category="user" if of_user else "server"
                        ) from error
                    _log.warning("the policy is started again: %s", error)
                except asyncio.CancelledError:
                    await self.close()  # ranks that compute for nobody cannot be asked again
                    raise
            raise AssertionError

    async def _start(self) -> None:
        self._starts += 1
        policy = self._config.policy.model_copy(update={"seed": self._seed})
        config = self._config.model_copy(update={"policy": policy})
        logs = self._store.states.parent / "logs"
        place = logs / f"policy-{self._number}-{self._starts}"
        launcher = await self._stack.enter_async_context(make_launcher(config, place))
        threads = policy_threads(config, cpu_count())
        group = policy_group(config, launcher, threads=threads)
        self._group = await self._stack.enter_async_context(group)
        self._publisher = WeightPublisher(
            group,
            config.sync,
            element_type=config.rollout.dtype,
            directory=(logs.parent / "weights").resolve(),
            security=server_security(config.rollout),
        )
        info = (await self.call(rank_pb.GetPolicyInfoRequest(backend=config.policy.backend)))[0]
        if not info.capabilities.step_settings:
            raise PolicyError(
                f"the ranks' treadle, {info.treadle_version}, takes no settings of a step: install "
                "this release in their environment (policy.command)",
                from_input=True,
            )
        if self.initial(self._seed) is None:
            content = await self.save()
            self._store.write(
                (
                    "INSERT INTO contents (id, shape, initial, seed) VALUES (?, ?, 1, ?)",
                    *(content, self.shape.text, self._seed),
                )
            )

    # --- with the lock held --------------------------------------------------------------------

    async def begin(self, seed: int) -> str:
        """Returns the state that models of a seed begin with; for a new seed, the ranks restart."""
        if self.initial(seed) is None:
            await self.close()
            self._seed = seed
            await self._start()
        content = self.initial(seed)
        assert content is not None, "it was saved when the ranks started"
        return content

    async def call(self, request: Message, sequences: Sequence[TrainSequence] = ()) -> list[Any]:
        """Sends a request to all ranks; see `PolicyGroup.call`."""
        assert self._group is not None, "use() has started it"
        return await self._group.call(request, sequences)

    @property
    def publisher(self) -> WeightPublisher:
        """Sends the weights to rollout servers."""
        assert self._publisher is not None, "use() has started it"
        return self._publisher

    async def save(self) -> str:
        """Writes the present state; returns its name, which no row has yet."""
        directory = self._store.states / uuid.uuid4().hex
        await self.call(SaveRequest(directory=str(directory.absolute())))
        self._content, self._gradients = directory.name, ()
        return directory.name

    async def take_up(
        self, content: str, gradients: Sequence[tuple[str, PolicyPass]] | None = None
    ) -> None:
        """Makes a state the present one.

        Args:
            gradients: Batches whose gradients came after the state, each with the name of its
                request; None: only the weights are needed.
        """
        wanted = tuple(name for name, _ in gradients or ())
        if self._content == content and (gradients is None or self._gradients == wanted):
            return
        await self.load(content)
        for name, batch in gradients or ():
            await self.add_gradient(name, batch)

    async def load(self, content: str, *, weights_only: bool = False) -> None:
        """Reads a state."""
        directory = self._store.states / content
        self._content, self._gradients = "", ()
        await self.call(LoadRequest(directory=str(directory.absolute()), weights_only=weights_only))
        self._content = "" if weights_only else content

    async def add_gradient(self, name: str, batch: PolicyPass) -> pb.ForwardBackwardResponse:
        """Adds the gradient of a batch to the present state's."""
        request = pb.ForwardBackwardRequest(
            algorithm=batch.algorithm, temperature=1.0, keep_tokens=True
        )
        response: pb.ForwardBackwardResponse = (await self.call(request, batch.sequences))[0]
        self._gradients = (*self._gradients, name)
        return response

    async def step(self, settings: pb.AdamW) -> pb.OptimizerStepResponse:
        """Takes an optimizer step; the state is then a new one, which has no name."""
        self._content, self._gradients = "", ()
        response: pb.OptimizerStepResponse = (
            await self.call(pb.OptimizerStepRequest(adamw=settings))
        )[0]
        return response


class Policies:
    """The policies of a service, started when they are needed."""

    def __init__(self, config: Config, store: Store, *, limit: int) -> None:
        """Args: limit: Maximum number of policies at a time; each has the base model in memory."""
        self._config = config
        self._store = store
        self._limit = limit
        self._policies: dict[Shape, Policy] = {}
        self._turns: dict[Shape, asyncio.Lock] = {}
        self._made = 0

    async def close(self) -> None:
        """Ends all ranks."""
        for policy in self._policies.values():
            await policy.close()

    def turn(self, shape: Shape) -> asyncio.Lock:
        """Returns the lock of the model whose turn it is to train, among those of a shape."""
        return self._turns.setdefault(shape, asyncio.Lock())

    @property
    def any(self) -> Policy | None:
        """A policy that runs or has run, if there is one."""
        return next(iter(self._policies.values()), None)

    async def of(self, shape: Shape) -> Policy:
        """Returns the policy of a shape; one that no model needs makes room for it.

        Raises:
            ServiceError: There are as many as there may be, and models need all of them.
        """
        if (policy := self._policies.get(shape)) is not None:
            return policy
        if len(self._policies) >= self._limit:
            needed = {
                row["shape"]
                for row in self._store.rows(
                    "SELECT shape FROM models JOIN sessions ON sessions.id = models.session WHERE "
                    "alive AND seen > ?",
                    time.time() - _SILENT_S,
                )
            }
            idle = [each for each in self._policies if each.text not in needed]
            if not idle:
                raise ServiceError(
                    f"{self._limit} policies train models of other ranks or matrices, each with "
                    "the base model in memory: unload a model, ask for what they train ("
                    f"{'; '.join(each.text for each in self._policies)}), or start the server with "
                    "a larger --max-policies"
                )
            leaving = self._policies.pop(idle[0])
            async with leaving.lock:
                await leaving.close()
        self._made += 1
        policy = self._policies[shape] = Policy(self._config, shape, self._store, number=self._made)
        return policy
