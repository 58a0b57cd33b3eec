"""HotpotQA as it is published -> training rows and a corpus for the search agent.

    python examples/hotpotqa_search/preprocess.py --output examples/hotpotqa_search/data

Downloads the questions with their paragraphs (`distractor`) from the Hugging Face Hub, or reads
`--source`: the list of the authors' site or files of the Hub, which write `context` differently.
Writes `train`, `test` and `corpus.jsonl`: every paragraph once, so that a question must be looked
up among those of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from treadle.trainer.data import DataError, read_rows
from treadle.trainer.problems import SeveralProblems

_HUB = Path("hf://datasets/hotpotqa/hotpot_qa/distractor/train-*.parquet")
SYSTEM = (
    "Answer the given question. Call the `search` tool as often as you need to look up facts; "
    "it takes several queries at once. Put your final answer, and nothing else of it, between "
    "<answer> and </answer>, for example <answer> Beijing </answer>."
)


def paragraphs(context: object) -> Iterator[tuple[str, str]]:
    """Yields the (title, text) of each paragraph of one question, in either spelling.

    Raises:
        TypeError: The context is in neither.
        ValueError: Its titles and paragraphs do not pair up.
    """
    match context:
        case {"title": list(titles), "sentences": list(paragraphs)}:
            pairs = list(zip(titles, paragraphs, strict=True))
        case list(pairs):
            pass
        case _:
            raise TypeError(f"context is {context!r:.80}")
    for title, sentences in pairs:
        yield title, "".join(sentences).strip()


def make_row(
    record: Mapping[str, object],
    *,
    split: str,
    index: int,
    source: str = "hotpotqa/hotpot_qa",
    system: str = SYSTEM,
) -> dict[str, object]:
    """Returns one training row.

    Args:
        record: Has `question` and `answer`.
        split: Of the data set, for the row's `extra_info`.
        index: In the split, likewise.
        source: The row's `data_source`.
        system: The system message.
    """
    return {
        "data_source": source,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": record["question"]},
        ],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": record["answer"]},
        "extra_info": {"split": split, "index": index},
    }


def read(
    files: Sequence[Path], *, limit: int | None = None
) -> tuple[list[Mapping[str, object]], dict[str, str]]:
    """Returns the questions of published files, and their paragraphs by title.

    Args:
        files: The authors' `.json`, or `.parquet` and `.jsonl`, here or on the Hub.
        limit: How many questions are read. None: all.

    Raises:
        DataError: A file cannot be fetched, or is not a list of questions with paragraphs.
        OSError: The authors' file cannot be read.
    """
    corpus: dict[str, str] = {}
    records: list[Mapping[str, object]] = []
    published = itertools.chain.from_iterable(_published(file, limit) for file in files)
    for place, record in itertools.islice(published, limit):
        try:
            question, answer = record["question"], record["answer"]
            if not isinstance(question, str) or not isinstance(answer, str):
                raise TypeError("question and answer must be texts")
            corpus.update(paragraphs(record["context"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{place}: {error!r}") from error
        records.append({"question": question, "answer": answer})
    return records, corpus


def _published(file: Path, limit: int | None) -> Iterator[tuple[str, Mapping[str, object]]]:
    if file.suffix != ".json":
        for row in read_rows([file], required=("question", "answer", "context"), limit=limit):
            yield row.place, row.columns
        return
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    if not isinstance(records, list) or not records:
        raise DataError(f"{file}: not a list of questions")
    for number, record in enumerate(records[:limit]):
        yield f"{file}, question {number}", record


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts a file; returns 0 on success."""
    parser = argparse.ArgumentParser(description="HotpotQA -> rows and corpus of the search agent")
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        default=[_HUB],
        metavar="FILE",
        help="the published questions: .json, .jsonl or .parquet (default: from the Hub, 360 MB)",
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--test", type=int, default=100, help="questions kept for validation")
    parser.add_argument("--limit", type=int, metavar="N", help="read the first N questions only")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit is {options.limit}: it must be at least 1")
    try:
        _convert(options)
    except (DataError, SeveralProblems, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _convert(options: argparse.Namespace) -> None:
    records, corpus = read(options.source, limit=options.limit)
    if not 0 < options.test < len(records):
        raise DataError(
            f"--test is {options.test}, of {len(records)} questions: some must be left on either "
            "side"
        )
    cut = len(records) - options.test
    options.output.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", records[:cut]), ("test", records[cut:])):
        rows = [make_row(record, split=split, index=i) for i, record in enumerate(part)]
        _write(options.output / f"{split}.jsonl", rows)
    entries = [{"title": title, "text": text} for title, text in corpus.items()]
    _write(options.output / "corpus.jsonl", entries)


def _write(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    sys.stdout.write(f"{path}: {len(entries)} lines\n")


if __name__ == "__main__":
    sys.exit(main())
