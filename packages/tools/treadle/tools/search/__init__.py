"""Search over passages: the tool, the client of a retrieval service, and a local BM25 index."""

from treadle.tools.search.passage import Passage, Retriever
from treadle.tools.search.tool import SearchTool

__all__ = ["Passage", "Retriever", "SearchTool"]
