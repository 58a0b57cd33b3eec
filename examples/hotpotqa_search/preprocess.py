"""HotpotQA as it is published -> training rows and a corpus for the search agent.

    python preprocess.py --source hotpot_train_v1.1.json --output data

Reads the questions with their paragraphs (the `distractor` setting; the list of the authors' site
or of the Hugging Face hub, whose `context` is written differently) and writes `train`, `test` and
`corpus.jsonl`: every paragraph once, so that a question must be looked up among those of all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SYSTEM = (
    "Answer the given question. Call the `search` tool as often as you need to look up facts; "
    "it takes several queries at once. Put your final answer, and nothing else of it, between "
    "<answer> and </answer>, for example <answer> Beijing </answer>."
)


class PreprocessError(ValueError):
    """The source is not HotpotQA; the text names file and question."""


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


def make_row(record: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one training row."""
    return {
        "data_source": "hotpotqa/hotpot_qa",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": record["question"]},
        ],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": record["answer"]},
        "extra_info": {"split": split, "index": index},
    }


def read(path: Path) -> tuple[list[Mapping[str, object]], dict[str, str]]:
    """Returns the questions of a published file, and its paragraphs by title.

    Raises:
        PreprocessError: The file is not a list of questions with paragraphs.
        OSError: The file cannot be read.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreprocessError(f"{path}: not JSON: {error}") from error
    if not isinstance(records, list) or not records:
        raise PreprocessError(f"{path}: not a list of questions")
    corpus: dict[str, str] = {}
    for number, record in enumerate(records):
        try:
            if not isinstance(record["question"], str) or not isinstance(record["answer"], str):
                raise TypeError("question and answer must be texts")
            corpus.update(paragraphs(record["context"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PreprocessError(f"{path}, question {number}: {error!r}") from error
    return records, corpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts a file; returns 0 on success."""
    parser = argparse.ArgumentParser(description="HotpotQA -> rows and corpus of the search agent")
    parser.add_argument("--source", type=Path, required=True, help="the published JSON file")
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--test", type=int, default=100, help="questions kept for validation")
    options = parser.parse_args(arguments)
    try:
        records, corpus = read(options.source)
        if not 0 < options.test < len(records):
            raise PreprocessError(
                f"--test is {options.test}, of {len(records)} questions: some must be left on "
                "either side"
            )
    except (PreprocessError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    cut = len(records) - options.test
    options.output.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", records[:cut]), ("test", records[cut:])):
        rows = [make_row(record, split=split, index=i) for i, record in enumerate(part)]
        _write(options.output / f"{split}.jsonl", rows)
    entries = [{"title": title, "text": text} for title, text in corpus.items()]
    _write(options.output / "corpus.jsonl", entries)
    return 0


def _write(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    sys.stdout.write(f"{path}: {len(entries)} lines\n")


if __name__ == "__main__":
    sys.exit(main())
