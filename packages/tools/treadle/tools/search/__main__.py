"""A retrieval service over a local BM25 index: `python -m treadle.tools.search --corpus FILE`.

It speaks Search-R1's protocol (see `service`), so that the workers of several hosts can share one
index. It listens on 127.0.0.1 by default, and has no access control. A request is limited in bytes
and in JSON values before it is parsed (413), and in the number of passages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from treadle.agent_loop import SetupError
from treadle.agent_loop.json_values import has_more_values
from treadle.tools.search.bm25 import Bm25Index

_MAX_BYTES: Final = 1 << 20
_MAX_QUERIES: Final = 4096
_MAX_TOPK: Final = 1000


def app(index: Bm25Index) -> Starlette:
    """Returns the HTTP application: `POST /retrieve`."""

    async def retrieve(request: Request) -> JSONResponse:
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > _MAX_BYTES or has_more_values(raw, _MAX_QUERIES):
                why = f"a request has at most {_MAX_BYTES} bytes and {_MAX_QUERIES} queries"
                return JSONResponse({"detail": why}, 413, {"connection": "close"})
        try:
            body = json.loads(raw)
            queries, topk = body["queries"], body.get("topk", 3)
            if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
                raise TypeError("queries must be a list of strings")
            if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= _MAX_TOPK:
                raise TypeError(f"topk must be an integer from 1 to {_MAX_TOPK}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, status_code=422)
        found = await index.retrieve(queries, topk=topk)
        result = [
            [{"document": {"contents": p.contents}, "score": p.score} for p in passages]
            for passages in found
        ]
        return JSONResponse({"result": result})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def main(argv: list[str] | None = None) -> int:
    """Serves until it is stopped; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m treadle.tools.search", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines of passages")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    try:
        index = Bm25Index.from_file(options.corpus)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    # h11 bounds the head of a request, 64 KiB; httptools does not.
    uvicorn.run(app(index), http="h11", host=options.host, port=options.port, log_level="info")
    return 0


if __name__ == "__main__":
    sys.exit(main())
