"""`search(query_list)`: lets the model look things up; all queries of a call in one request.

Invariant: the model reads errors about its own arguments; a failure of the retrieval service fails
the trajectory and never becomes training text. Schema, settings and wording are verl's
`SearchTool`; `corpus_path`, an index in the process instead of a service, is ours.

    config:
      retrieval_service_url: http://127.0.0.1:8000/retrieve   # or corpus_path: corpus.jsonl
      topk: 3
      # With a service only:
      num_workers: 120                # requests of this process at one time
      rate_limit: 120                 # requests of this host at one time, unless ...
      enable_global_rate_limit: true  #   ... this is false
      default_timeout: 30             # seconds for one answer
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from treadle.agent_loop import AgentTask, SetupError, ToolFailure, ToolResult, ToolSpec
from treadle.tools.arguments import require_extra
from treadle.tools.search.passage import Retriever, as_text
from treadle.tools.yaml_config import section
from treadle.tracing import Metric, Reduce

SPEC = ToolSpec(
    name="search",
    description="Searches for relevant information based on queries.",
    parameters={
        "type": "object",
        "properties": {
            "query_list": {
                "type": "array",
                "items": {"type": "string"},
                "description": "List of search queries",
            }
        },
        "required": ["query_list"],
    },
)

_SERVICE_KEYS = ("num_workers", "rate_limit", "enable_global_rate_limit", "default_timeout")
_KEYS = ("retrieval_service_url", "corpus_path", "topk", *_SERVICE_KEYS)
_MAX_QUERIES = 32
_QUERIES, _RESULTS = "search/queries", "search/results"


class SearchTool:
    """Searches with a retrieval service or a local index.

    Args:
        spec: Description for the model; None: `SPEC`.

    Raises:
        SetupError: A setting is unknown or wrong, or the corpus cannot be read.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        settings = section(config or {}, "config", required=(), optional=_KEYS)
        self.spec = spec
        self._topk = int(_positive(settings, "topk", 3))
        self._retriever = _retriever(settings)

    @property
    def metric_rules(self) -> Mapping[str, Reduce]:
        """See `treadle.agent_loop.ReportsMetrics`."""
        return dict.fromkeys((_QUERIES, _RESULTS), Reduce.SUM)

    async def open(self, task: AgentTask) -> SearchTool:
        """Returns itself: a search keeps no state but the connections.

        Raises:
            SetupError: A limit over processes cannot be kept here.
        """
        await self._retriever.enter()
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Searches for each query.

        Raises:
            ToolFailure: `query_list` is not a list of strings.
            ConnectionError: The retrieval service cannot answer.
        """
        queries = arguments.get("query_list")
        if not isinstance(queries, list) or not queries:
            raise ToolFailure(f"'query_list' must be a list of queries, not {queries!r}")
        if not all(isinstance(query, str) and query.strip() for query in queries):
            raise ToolFailure(f"every query must be a string, and not empty: {queries!r}")
        if len(queries) > _MAX_QUERIES:
            raise ToolFailure(f"at most {_MAX_QUERIES} queries are taken, not {len(queries)}")
        found = await self._retriever.retrieve(queries, topk=self._topk)
        return ToolResult(
            content=as_text(found),
            metrics=(
                Metric(_QUERIES, len(queries), Reduce.SUM),
                Metric(_RESULTS, sum(map(len, found)), Reduce.SUM),
            ),
        )

    async def aclose(self) -> None:
        """Closes the connections, if no other trajectory uses them."""
        await self._retriever.leave()


def _retriever(settings: Mapping[str, object]) -> Retriever:
    url, corpus = settings.get("retrieval_service_url"), settings.get("corpus_path")
    if (not url) is (not corpus):
        raise SetupError(
            f"search needs either retrieval_service_url ({url!r}) or corpus_path ({corpus!r})"
        )
    if corpus:
        unused = [key for key in _SERVICE_KEYS if key in settings]
        if unused:
            raise SetupError(
                f"search: {', '.join(unused)} are for retrieval_service_url; a corpus_path needs "
                "none of them"
            )
        require_extra("search with corpus_path", "bm25s", "search")
        from treadle.tools.search.bm25 import Bm25Index

        return Bm25Index.from_file(Path(str(corpus)))
    require_extra("search with retrieval_service_url", "httpx", "search")
    from treadle.tools.search.service import RetrievalService

    shared = settings.get("enable_global_rate_limit", True)
    if not isinstance(shared, bool):
        raise SetupError(f"search: enable_global_rate_limit must be true or false, not {shared!r}")
    rate_limit = int(_positive(settings, "rate_limit", 120))
    return RetrievalService(
        str(url),
        timeout_s=_positive(settings, "default_timeout", 30.0),
        num_workers=int(_positive(settings, "num_workers", 120)),
        rate_limit=rate_limit if shared else None,
    )


def _positive(settings: Mapping[str, object], key: str, default: float) -> float:
    value = settings.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, type(default) | int)
        or not 0 < value < math.inf
    ):
        kind = "an integer" if isinstance(default, int) else "a number"
        raise SetupError(f"search: {key} must be {kind} above 0, not {value!r}")
    return value
