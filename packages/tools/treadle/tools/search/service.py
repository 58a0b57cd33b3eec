r"""The client of a retrieval service that speaks Search-R1's protocol.

    POST url {"queries": [...], "topk": 3, "return_scores": true}
    200      {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, ...], ...]}

Invariant: an answer has one list per query, or is an error. Answers 500, 502, 503 and 504, a
refused connection and no answer in time are tried again, `attempts` times in all, after 1, 2, 3...
seconds, as in verl; everything else is an error at once. The model never reads errors:
a fault of the service is not the model's fault.

All attempts together end after `patience_s`, which is less than what the loop gives a tool: else
the model would be told that its call took too long.

A request waits for a free slot in the process, then in the host, then for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from treadle.tools.host_semaphore import HostSemaphore
from treadle.tools.search.passage import Passage
from treadle.tracing import traced

_TRY_AGAIN = frozenset({500, 502, 503, 504})


class RetrievalService:
    """A retrieval service, reached over HTTP.

    Args:
        num_workers: Requests at a time, in one process.
        rate_limit: Requests at a time to this URL, over the processes of this host. None: no limit.
        patience_s: For all attempts, the waits between them and for a slot.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        num_workers: int = 120,
        rate_limit: int | None = None,
        attempts: int = 10,
        patience_s: float = 50.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._rate_limit = rate_limit
        self._attempts = attempts
        self._patience_s = patience_s
        self._sleep = sleep
        self._transport = transport
        self._users = 0
        self._open: _Open | None = None

    async def enter(self) -> None:
        """Opens the connections, unless somebody has.

        Raises:
            SetupError: The limit over processes cannot be kept here.
        """
        if self._open is None:
            limit = None
            if self._rate_limit is not None:
                limit = HostSemaphore(f"search {self._url}", self._rate_limit)
                await limit.__aenter__()  # does not suspend: nobody else comes in between
            http = httpx.AsyncClient(
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=self._num_workers),
                transport=self._transport,
            )
            self._open = _Open(http=http, slots=asyncio.Semaphore(self._num_workers), limit=limit)
        self._users += 1

    async def leave(self) -> None:
        """Closes the connections if nobody else uses them."""
        self._users -= 1
        if self._users == 0:
            opened, self._open = self._open, None
            assert opened is not None, "each `leave` ends one `enter`"
            if opened.limit is not None:
                await opened.limit.__aexit__(None, None, None)
            await opened.http.aclose()

    @traced
    async def retrieve(self, queries: Sequence[str], *, topk: int) -> list[list[Passage]]:
        """Asks all queries in one request; between `enter` and `leave`.

        Raises:
            ConnectionError: No attempt was answered, or the answer is not of the protocol.
        """
        opened = self._open
        assert opened is not None, "retrieve comes between enter and leave"
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        failure, attempt = "none was sent", 0
        patience = asyncio.timeout(self._patience_s)
        try:
            async with patience:
                for attempt in range(1, self._attempts + 1):
                    if attempt > 1:
                        await self._sleep(attempt - 1)
                    try:
                        async with opened.slot():
                            response = await opened.http.post(self._url, json=body)
                    except httpx.TransportError as error:
                        failure = f"{type(error).__name__}: {error}"
                        continue
                    if response.status_code not in _TRY_AGAIN:
                        return self._read(response, len(queries))
                    failure = f"status {response.status_code}"
        except TimeoutError:
            if not patience.expired():
                raise
            raise ConnectionError(
                f"the retrieval service {self._url} did not answer within {self._patience_s:g} s, "
                f"in {attempt} attempts; the last to end: {failure}"
            ) from None
        raise ConnectionError(
            f"the retrieval service {self._url} did not answer in {self._attempts} attempts; "
            f"the last: {failure}"
        )

    def _read(self, response: httpx.Response, num_queries: int) -> list[list[Passage]]:
        if response.status_code != 200:
            raise ConnectionError(
                f"the retrieval service {self._url} answered with status {response.status_code}: "
                f"{response.text[:200]!r}"
            )
        try:
            found = [
                [
                    Passage(
                        contents=entry["document"]["contents"], score=float(entry.get("score", 0))
                    )
                    for entry in entries
                ]
                for entries in response.json()["result"]
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConnectionError(
                f"the retrieval service {self._url} does not speak Search-R1's protocol "
                f"({type(error).__name__}: {error}): {response.text[:200]!r}"
            ) from error
        if len(found) != num_queries:
            raise ConnectionError(
                f"the retrieval service {self._url} gave {len(found)} answers to {num_queries} "
                "queries"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """The connection and the limits that are open while somebody uses the service."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    limit: HostSemaphore | None

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot in the process and in the host."""
        async with self.slots:
            if self.limit is None:
                yield
                return
            async with self.limit.slot():
                yield
