r"""The client of a retrieval service that speaks Search-R1's protocol.

    POST url {"queries": [...], "topk": 3, "return_scores": true}
    200      {"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, ...], ...]}

Invariant: an answer has one list for each query, or is an error. Answers 500, 502, 503 and 504, a
refused connection and no answer in time are tried again, `attempts` times in all, after 1, 2, 3...
seconds, as in verl; everything else is an error at once. Errors are never a text for the model:
what the service lacks is not the model's fault.

A query waits for a free place, then for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from treadle.tools.search.passage import Passage

_TRY_AGAIN = frozenset({500, 502, 503, 504})


class RetrievalService:
    """A retrieval service, reached over HTTP.

    Args:
        url: Of its `retrieve` method.
        timeout_s: For one answer.
        rate_limit: Requests at a time, in one process.
        attempts: In all.
        sleep: Waits between two attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        rate_limit: int = 120,
        attempts: int = 10,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(timeout=timeout_s)
        self._places = asyncio.Semaphore(rate_limit)
        self._attempts = attempts
        self._sleep = sleep

    async def retrieve(self, queries: Sequence[str], *, topk: int) -> list[list[Passage]]:
        """Asks all queries in one request.

        Raises:
            ConnectionError: No attempt was answered, or the answer is not of the protocol.
        """
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        async with self._places:
            for attempt in range(1, self._attempts + 1):
                if attempt > 1:
                    await self._sleep(attempt - 1)
                try:
                    response = await self._http.post(self._url, json=body)
                except httpx.TransportError as error:
                    failure = f"{type(error).__name__}: {error}"
                    continue
                if response.status_code not in _TRY_AGAIN:
                    return self._read(response, len(queries))
                failure = f"status {response.status_code}"
        raise ConnectionError(
            f"the retrieval service {self._url} did not answer in {self._attempts} attempts; "
            f"the last: {failure}"
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

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
