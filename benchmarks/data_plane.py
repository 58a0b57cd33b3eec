"""The data plane: trajectories from worker processes over the driver to the policy's ranks.

Workers make trajectories and hand them over as loop workers do: one by one, over gRPC.
The driver makes the batch of a step and gives it to the ranks over gRPC, processes that do what a
policy rank does before it computes: receive, and make sequences of what came::

    ./pants run benchmarks/data_plane.py -- --rounds 5

A trajectory has tokens, messages with as many characters per token as `--characters` says, and the
text for the trajectory files. The characters are random digits: other text takes less on the wire.
Nothing is traced.

The time begins when the workers hold their trajectories and ends when the last rank has its
sequences. Memory is the growth of the resident set of the process, at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    Image,
    Message,
    StopReason,
    TokenChunk,
    Trajectory,
    Transcript,
)
from treadle.agent_loop.rpc.driven import (
    DrivenAccess,
    DrivenProgram,
    serve_driver_in_threads,
)
from treadle.agent_loop.rpc.driver_stream import DriverEnd, ProgramEnd
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.loop_worker.v1 import loop_worker_service_pb2_grpc as pb_grpc
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.client.group import send_shard
from treadle.policy.client.shards import Outgoing, assign, decode
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.rank.server import RankServer
from treadle.trainer.rollout.workers.stored_text import StoredText, stored_text
from treadle.trainer.rollout.workers.trajectory_codec import pack_trajectory, read_trajectory
from treadle.trainer.training_loop.groups import groups_of, make_batch

SAMPLES = 8  # of a row
TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One batch on its way.

    Attributes:
        gather_s: From the workers into the driver.
        batch_s: Groups, advantages and sequences.
        send_s: From the driver into the ranks, to sequences.
        first_s: The same, of the first rank that has its own.
        driver_cpu_s: Processor time of the driver for all of it, of all threads.
        rank_cpu_s: The same, of the rank that took most.
        worker_bytes: That the workers sent.
        rank_wire_bytes: That the driver sent.
        held_bytes: Growth of the driver with the batch in its memory, before it sends.
        driver_bytes: Growth of the driver at its peak.
        rank_bytes: The same, of the rank with the most.
    """

    gather_s: float
    batch_s: float
    send_s: float
    first_s: float
    driver_cpu_s: float
    rank_cpu_s: float
    worker_bytes: int
    rank_wire_bytes: int
    held_bytes: int
    driver_bytes: int
    rank_bytes: int

    @property
    def whole_s(self) -> float:
        """All of it."""
        return self.gather_s + self.batch_s + self.send_s


def main() -> None:
    """Prints the figures of some rounds; each starts its processes again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_000_000)
    parser.add_argument("--length", type=int, default=4_096, help="tokens of a trajectory")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--characters", type=float, default=3.0, help="of text for a token")
    args = parser.parse_args()
    rounds = [in_process(measure, args) for _ in range(args.rounds)]
    tokens = args.tokens // (args.length * SAMPLES) * args.length * SAMPLES
    print(f"{tokens} tokens, {args.workers} workers, {args.ranks} ranks")
    for name, values in {
        "workers to driver, s": [r.gather_s for r in rounds],
        "batch, s": [r.batch_s for r in rounds],
        "driver to ranks, s": [r.send_s for r in rounds],
        "driver to the first rank, s": [r.first_s for r in rounds],
        "all, s": [r.whole_s for r in rounds],
        "driver, s of processor time": [r.driver_cpu_s for r in rounds],
        "rank with the most, s of it": [r.rank_cpu_s for r in rounds],
        "workers to driver, bytes a token": [r.worker_bytes / tokens for r in rounds],
        "driver to ranks, bytes a token": [r.rank_wire_bytes / tokens for r in rounds],
        "bytes a token held in the driver": [r.held_bytes / tokens for r in rounds],
        "driver, MB": [r.driver_bytes / 1e6 for r in rounds],
        "rank with the most, MB": [r.rank_bytes / 1e6 for r in rounds],
    }.items():
        low, high = min(values), max(values)
        print(f"{name:34} {statistics.median(values):8.2f}  ({low:.2f} to {high:.2f})")


def in_process(function: Any, *args: Any) -> Any:
    """Returns what a function returns in a fresh process, whose memory nothing else has grown."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = start(_answer, theirs, function, args)
    theirs.close()  # so that the end of the process ends the wait
    answer = ours.recv()
    process.join()
    return answer


def _answer(connection: Connection[Any, Any], function: Any, args: tuple[Any, ...]) -> None:
    connection.send(function(*args))


def start(function: Any, *args: Any) -> Any:
    """Starts a process that is not a copy of this one."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    return process


def measure(args: argparse.Namespace) -> Round:
    """Starts workers and ranks, and moves one batch."""
    pipe = multiprocessing.get_context("spawn").Pipe
    workers, ranks, processes = [], [], []
    access = DrivenAccess()
    rows = args.tokens // (args.length * SAMPLES)
    for number in range(args.workers):
        ours, theirs = pipe()
        workers.append(ours)
        mine = range(number, rows, args.workers)
        of_worker = mine, args.length, args.characters
        processes.append(start(work, theirs, access.token, *of_worker))
        theirs.close()
    for _ in range(args.ranks):
        ours, theirs = pipe()
        ranks.append(ours)
        processes.append(start(rank, theirs, access.token))
        theirs.close()
    addresses = [connection.recv() for connection in workers]
    rank_addresses = [connection.recv() for connection in ranks]
    result = asyncio.run(move(access, addresses, rank_addresses, ranks, rows))
    for process in processes:
        process.join()
    return result


async def move(
    access: DrivenAccess,
    addresses: Sequence[str],
    rank_addresses: Sequence[str],
    ranks: Sequence[Connection[Any, Any]],
    rows: int,
) -> Round:
    """Moves one batch; the connections to the workers are there before."""
    tasks = [task(row, sample) for row in range(rows) for sample in range(SAMPLES)]
    gathering = Gathering(tasks)
    async with AsyncExitStack() as stack:
        streams = [gathering.stream(access, address) for address in addresses]
        for stream in streams:
            stack.push_async_callback(stream.aclose)
        for _ in streams:
            await gathering.connected.get()
        before = memory("VmRSS")
        began, began_cpu = time.perf_counter(), time.process_time()
        for stream in streams:
            stream.send(pb.Command(end=pb.End()))
        await gathering.all_here.wait()
        gathered = time.perf_counter()
        config = AlgorithmConfig()
        batch = make_batch(groups_of(gathering.found), find_estimator(config), version=1)
        made = time.perf_counter()
        held = memory("VmRSS") - before
        sent = await send_all_shards(batch.sequences, access, rank_addresses, ranks)
        ended, ended_cpu = time.perf_counter(), time.process_time()
    return Round(
        gather_s=gathered - began,
        batch_s=made - gathered,
        send_s=ended - made,
        first_s=min(at for at, *_ in sent) - made,
        driver_cpu_s=ended_cpu - began_cpu,
        rank_cpu_s=max(cpu_s for *_, cpu_s in sent),
        worker_bytes=gathering.num_bytes,
        rank_wire_bytes=sum(wire for _, wire, _, _ in sent),
        held_bytes=held,
        driver_bytes=memory("VmHWM") - before,
        rank_bytes=max(grown for _, _, grown, _ in sent),
    )


async def send_all_shards(
    sequences: Sequence[TrainSequence],
    access: DrivenAccess,
    addresses: Sequence[str],
    ranks: Sequence[Connection[Any, Any]],
) -> list[tuple[float, int, int, float]]:
    """Sends each rank its shard, as `PolicyGroup.call` does.

    Returns:
        Of each rank, when it had its sequences, the bytes sent, its growth and its processor time.
    """
    outgoing, numbers = Outgoing(len(ranks)), assign(sequences, len(ranks))
    encoding = asyncio.create_task(asyncio.to_thread(outgoing.encode, sequences, numbers, batch=1))
    security = access.channels()

    async def send(number: int) -> tuple[float, int, int, float]:
        async with outgoing.taken(number) as shard, security.open(addresses[number]) as channel:
            size = shard.head.ByteSize() + shard.head.memory_bytes
            await send_shard(channel, shard, security.metadata)
        grown, cpu_s = await asyncio.to_thread(ranks[number].recv)
        return time.perf_counter(), size, grown, cpu_s

    sent = await asyncio.gather(*map(send, range(len(ranks))))
    await encoding
    return list(sent)


def rank(connection: Connection[Any, Any], token: str) -> None:
    """Receives sequences, as a policy rank does."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        program = DrivenProgram(host="127.0.0.1", token=token, ready_file=ready)
        with RankServer(program) as server:
            connection.send(json.loads(ready.read_text())["address"])
            before, before_cpu = memory("VmRSS"), time.process_time()
            sequences = decode(*server.take_batch(1))
            assert sum(len(sequence.ids) for sequence in sequences) > 0
            connection.send((memory("VmHWM") - before, time.process_time() - before_cpu))


class Gathering:
    """The trajectories that the driver has of all workers.

    Args:
        tasks: All of them, by their numbers.
    """

    def __init__(self, tasks: Sequence[AgentTask]) -> None:
        self.found: list[Trajectory] = []
        self.num_bytes = 0
        self.connected = asyncio.Queue[None]()
        self.all_here = asyncio.Event()
        self._tasks = tasks
        self._known: list[dict[Image, Image]] = [{} for _ in tasks[::SAMPLES]]

    def stream(self, access: DrivenAccess, address: str) -> DriverEnd:
        """Returns the stream to a worker."""
        return DriverEnd(
            access,
            address,
            lambda channel: pb_grpc.LoopWorkerServiceStub(channel).Work,
            split=self._split,
            join=lambda commands: pb.WorkRequest(commands=commands),
            on_message=self._take,
            on_end=lambda _: None,
        )

    def _split(self, response: pb.WorkResponse) -> Iterable[pb.Event]:
        self.num_bytes += response.ByteSize()
        return response.events

    def _take(self, event: pb.Event) -> None:
        if event.WhichOneof("message") == "alive":
            self.connected.put_nowait(None)
            return
        of = self._tasks[event.ended.number]
        known = self._known[of.sample_index]
        self.found.append(read_trajectory(event.ended.trajectory, of, known))
        if len(self.found) == len(self._tasks):
            self.all_here.set()


def work(
    connection: Connection[Any, Any],
    token: str,
    rows: Sequence[int],
    length: int,
    characters: float,
) -> None:
    """Makes the trajectories of some rows, and hands them over when it is asked to."""
    made = [
        trajectory(row, sample, length, characters) for row in rows for sample in range(SAMPLES)
    ]
    asyncio.run(send_all(connection, token, made, characters))


async def send_all(
    connection: Connection[Any, Any], token: str, made: Sequence[Trajectory], characters: float
) -> None:
    """Waits until it is asked, sends all trajectories, and waits until the driver has them."""
    asked, over = asyncio.Event(), asyncio.Event()
    stream = ProgramEnd(
        split=lambda request: request.commands,
        join=lambda events: pb.WorkResponse(events=events),
        on_message=lambda _: asked.set(),
        on_end=over.set,
        beat=lambda: pb.Event(alive=pb.Alive()),
        beat_s=1.0,
    )
    servicer: Any = pb_grpc.LoopWorkerServiceServicer()
    servicer.Work = stream.serve
    add = partial(pb_grpc.add_LoopWorkerServiceServicer_to_server, servicer)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        program = DrivenProgram(host="127.0.0.1", token=token, ready_file=ready)
        with serve_driver_in_threads(program, add) as address:
            connection.send(address)
            await asked.wait()
            for each in made:
                number = each.task.sample_index * SAMPLES + each.task.rollout_index
                packed = pack_trajectory(each, each.task, text_of(each, characters))
                stream.send(pb.Event(ended=pb.Ended(run=1, number=number, trajectory=packed)))
            await over.wait()


def task(row: int, sample: int) -> AgentTask:
    """Returns what the driver gave."""
    return AgentTask(
        task_id=f"train/{row}",
        sample_index=row,
        rollout_index=sample,
        loop="tool_agent",
        messages=(Message(role="user", content="What is 6 * 7?"),),
    )


def trajectory(row: int, sample: int, length: int, characters: float) -> Trajectory:
    """Returns one of several turns, half of whose tokens are sampled."""
    draw = random.Random(row * SAMPLES + sample)
    part = length // (2 * TURNS)
    transcript = Transcript(draw.choices(range(150_000), k=length - part * (2 * TURNS - 1)))
    for turn in range(TURNS):
        if turn:
            transcript.observe(draw.choices(range(150_000), k=part))
        ids = tuple(draw.choices(range(150_000), k=part))
        chunk = TokenChunk(
            token_ids=ids,
            logprobs=tuple(-draw.random() for _ in ids),
            weight_version=1,
        )
        transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
    of = task(row, sample)
    messages = [*of.messages]
    for turn in range(2 * TURNS - 1):
        text = draw.randbytes(round(characters * part / 2)).hex()
        messages.append(Message(role="tool" if turn % 2 else "assistant", content=text))
    return Trajectory(
        task=of,
        samples=(transcript.freeze(),),
        messages=tuple(messages),
        stop=StopReason.FINISHED,
        reward=float(sample % 2),
    )


def text_of(made: Trajectory, characters: float) -> StoredText:
    """Returns what a worker makes for the trajectory files; a span says what a message says."""
    prompt = made.tokens.spans[0].stop
    asked = random.randbytes(round(characters * prompt / 2)).hex()
    spans = iter([asked, *(message.content for message in made.messages[1:])])
    return stored_text(made, lambda _: next(spans), response_characters=2000)


def memory(name: str) -> int:
    """Returns a figure of this process's memory, in bytes: VmRSS, or VmHWM for its peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    raise AssertionError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main()
