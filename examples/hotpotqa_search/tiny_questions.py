"""Questions of two hops for a model of one million parameters, in HotpotQA's form.

    cd examples; python -m hotpotqa_search.tiny_questions --output hotpotqa_search/data/tiny

writes `sft_train.jsonl` and `sft_val.jsonl` for `treadle sft`, and `train.jsonl`, `val.jsonl` and
`corpus.jsonl` for reinforcement. A question names a company or a book; one paragraph says who
founded or wrote it, a second one, of that person, has the answer:

    In which town was the founder of company 381 born?
    Company 381 was founded by person 942.
    Person 942 was born in town 105 and went to school 640.

All names are numbers, because the demo's model has learned to copy digits and nothing else. They
are drawn at random, so that nobody can guess an answer, and the first paragraph does not have it.

The conversations have habits that reinforcement is to change: with the prompt of a rollout, a
quarter of them answers without a search and a quarter after one search, with a number that is at
hand and wrong. Those without the prompt search twice.

Invariants: the files are a pure function of the seed; no question of `train` shares a company, a
book or a person with one of `val`; and each conversation has facts that are drawn for it alone, so
that imitation teaches how to search and nothing that the corpus contains.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotpotqa_search.preprocess import make_row, paragraphs

from treadle.tools.search.passage import Passage, as_text
from treadle.tools.search.tool import SPEC

__all__ = ["SYSTEM", "TwoHops", "conversation", "data_files", "draw", "main", "published"]

SYSTEM: Final = "Use search. Put the answer between <answer> and </answer>."
"""Short, because it is part of every prompt."""

_NAMES: Final = range(100, 1000)
_NUM_ROWS: Final = {"sft_train": 10_000, "sft_val": 64, "train": 340, "val": 96}
_NUM_CONTEXT: Final = 4
_DRILLS: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHops:
    """A company or book, the person behind it, and two facts about that person.

    Attributes:
        asks_town: A company and its founder's town are asked for; else a book and its author's
            school.
        start: The number of the company or book.
        person: The number of its founder or author.
        town: The number of the town where the person was born.
        school: The number of the school that the person went to.
    """

    asks_town: bool
    start: int
    person: int
    town: int
    school: int

    @property
    def question(self) -> str:
        """What is asked."""
        if self.asks_town:
            return f"In which town was the founder of {self.hops[0]} born?"
        return f"Which school did the author of {self.hops[0]} go to?"

    @property
    def hops(self) -> tuple[str, str]:
        """The names to search for, one after the other."""
        return f"{'company' if self.asks_town else 'book'} {self.start}", f"person {self.person}"

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.answer_of(self.town if self.asks_town else self.school)

    def answer_of(self, number: int) -> str:
        """Returns an answer of the form that is asked for."""
        return f"{'town' if self.asks_town else 'school'} {number}"

    @property
    def documents(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Title and text of the paragraph that each hop finds."""
        first, second = (hop.capitalize() for hop in self.hops)
        made = "founded" if self.asks_town else "written"
        about = f"was born in town {self.town} and went to school {self.school}."
        # The title again, as in an encyclopedia: a search for a person finds their paragraph before
        # that of their company.
        return (first, f"{first} was {made} by {self.hops[1]}."), (second, f"{second} {about}")


def draw(rng: random.Random, *, start: int, person: int, asks_town: bool) -> TwoHops:
    """Returns a question with random facts, different from all numbers that are at hand before."""
    town, school = rng.sample([name for name in _NAMES if name not in (start, person)], 2)
    return TwoHops(asks_town=asks_town, start=start, person=person, town=town, school=school)


def published(question: TwoHops, context: Sequence[TwoHops]) -> dict[str, object]:
    """Returns a record as HotpotQA's authors publish it.

    Args:
        question: What is asked.
        context: Its own paragraphs and those that distract from them.
    """
    documents = [document for each in context for document in each.documents]
    return {
        "_id": f"{question.start}-{question.person}",
        "question": question.question,
        "answer": question.answer,
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [[title, 0] for title, _ in question.documents],
        "context": [[title, [text]] for title, text in documents],
    }


def conversation(question: TwoHops, *, searches: int, prompt: bool = True) -> dict[str, object]:
    """Returns a row of `treadle sft`.

    Args:
        question: What is asked.
        searches: 0 to 2. With fewer than 2 the answer is the newest number that is known, and
            wrong.
        prompt: With the system message and the tool's schema, as a rollout has them. Without, the
            model learns the same copies from half as many tokens.
    """
    messages: list[dict[str, object]] = [{"role": "user", "content": question.question}]
    found = zip(question.hops, question.documents, strict=True)
    for query, (title, text) in list(found)[:searches]:
        call = {"name": SPEC.name, "arguments": {"query_list": [query]}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": as_text([[Passage(contents=f"{title}\n{text}")]])},
        ]
    answers = (
        question.answer_of(question.start),
        question.answer_of(question.person),
        question.answer,
    )
    said = f"<answer> {answers[searches]} </answer>"
    messages.append({"role": "assistant", "content": said})
    if not prompt:
        return {"messages": messages}
    system = {"role": "system", "content": SYSTEM}
    return {"messages": [system, *messages], "tools": [SPEC.as_schema()]}


def data_files(*, seed: int, num_rows: Mapping[str, int]) -> dict[str, list[Mapping[str, object]]]:
    """Returns the rows of each file, by its name without ending.

    Args:
        seed: Of all facts and habits.
        num_rows: Rows of `train`, `val`, `sft_train` and `sft_val`.
    """
    rng = random.Random(seed)
    num_val, num_questions = num_rows["val"], num_rows["val"] + num_rows["train"]
    # No two share a number: else a search for a person might find a company.
    names = rng.sample(_NAMES, 2 * num_questions)
    pairs = zip(names[:num_questions], names[num_questions:], strict=True)
    questions = [
        draw(rng, start=start, person=person, asks_town=index % 2 == 0)
        for index, (start, person) in enumerate(pairs)
    ]
    records = []
    for index, question in enumerate(questions):
        others = rng.sample(questions[:index] + questions[index + 1 :], _NUM_CONTEXT)
        context = [question, *others]
        rng.shuffle(context)
        records.append(published(question, context))
    corpus = dict(pair for record in records for pair in paragraphs(record["context"]))
    files: dict[str, list[Mapping[str, object]]] = {
        "corpus": [{"title": title, "text": text} for title, text in corpus.items()]
    }
    for split, part in (("val", records[:num_val]), ("train", records[num_val:])):
        files[split] = [
            make_row(record, split=split, index=i, source="two_hops", system=SYSTEM)
            for i, record in enumerate(part)
        ]
    for name in ("sft_val", "sft_train"):
        files[name] = [_habit(rng) for _ in range(num_rows[name])]
    return files


def _habit(rng: random.Random) -> Mapping[str, object]:
    start, person = rng.sample(_NAMES, 2)
    question = draw(rng, start=start, person=person, asks_town=rng.random() < 0.5)
    if rng.random() < _DRILLS:
        return conversation(question, searches=2, prompt=False)
    return conversation(question, searches=rng.choice((0, 1, 2, 2)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the questions of the tiny run.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in data_files(seed=options.seed, num_rows=_NUM_ROWS).items():
        path = options.output / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {len(rows)} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
