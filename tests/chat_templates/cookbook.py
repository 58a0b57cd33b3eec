"""Prints the table of docs/serve.md: the renderers of Tinker's cookbook beside ours, id by id.

    python tests/chat_templates/cookbook.py DATA PYTHON

DATA is that of `table.py`; PYTHON is the interpreter of an environment with `tinker-cookbook`. Ours
renders by the model's own chat template, theirs by code. A conversation is rendered up to each turn
of the model, as the prompt for it. As the tokenizers of most models are not at hand, Qwen3's has
the template's special tokens added.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chat_templates.conversations import CONVERSATIONS, TOOLS, Conversation, reduced, thinking
from chat_templates.table import BAR, AnyParser, make_tokenizer, shows_reasoning, table_row
from treadle.agent_loop import RenderError, SetupError
from treadle.agent_loop.hf import HfRenderer

PROGRAM: Final = Path(__file__).parents[1] / "installs/renderers_program.py"
_BOS: Final = {"meta": "<|begin_of_text|>", "deepseek": f"<{BAR}begin▁of▁sentence{BAR}>"}
"""What a model's tokenizer begins with, by the beginning of the template's name."""
_QWEN3, _QWEN3_5 = "Qwen-Qwen3-0.6B", "Qwen3.5-4B"
_NEMOTRON: Final = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
_DEEPSEEK, _GPT = "deepseek-ai-DeepSeek-V3.1", "openai-gpt-oss-120b"
PAIRS: Final[Sequence[tuple[str, str, Mapping[str, Any]]]] = (
    ("qwen3", _QWEN3, {}),
    ("qwen3_disable_thinking", _QWEN3, {"enable_thinking": False}),
    ("qwen3_instruct", "tokenizers/tiny", {}),
    ("qwen3_5", _QWEN3_5, {}),
    ("qwen3_5_disable_thinking", _QWEN3_5, {"enable_thinking": False}),
    ("llama3", "meta-llama-Llama-3.1-8B-Instruct", {}),
    ("llama3", "meta-llama-Llama-3.3-70B-Instruct", {}),
    ("kimi_k2", "Kimi-K2-Thinking", {}),
    ("nemotron3", _NEMOTRON, {}),
    ("nemotron3_disable_thinking", _NEMOTRON, {"enable_thinking": False}),
    ("nemotron3_preserve_thinking", _NEMOTRON, {"truncate_history_thinking": False}),
    ("deepseekv3", _DEEPSEEK, {}),
    ("deepseekv3_thinking", _DEEPSEEK, {"thinking": True}),
    ("gpt_oss_medium_reasoning", _GPT, {"reasoning_effort": "medium"}),
)
"""Renderers of the cookbook, the template of a model that each is for, and its settings."""


@dataclass(slots=True)
class _Compared:
    """A conversation up to each turn of the model: the chats, and the ids of ours.

    `refused` says why the template does not take it.
    """

    name: str
    chats: list[Mapping[str, Any]] = field(default_factory=list)
    ids: list[Sequence[int]] = field(default_factory=list)
    refused: str = ""


def _ours(renderer: HfRenderer, conversation: Conversation) -> _Compared:
    compared = _Compared(conversation.name)
    tools = TOOLS if conversation.tools else ()
    places = [i for i, each in enumerate(conversation.messages) if each.role == "assistant"]
    for before in (conversation.messages[:place] for place in places):
        try:
            compared.ids.append(renderer.render(before, tools=tools).ids)
        except (RenderError, SetupError) as error:
            return _Compared(conversation.name, refused=" ".join(str(error).split()))
        chat = renderer.template.dicts(before)
        shown = [tool.as_schema() for tool in tools]
        compared.chats.append({"messages": chat, "tools": shown})
    return compared


def _all_ours(renderer: HfRenderer) -> Iterator[_Compared]:
    """Renders each conversation, in a form that the template takes if there is one."""
    for conversation in CONVERSATIONS:
        tried = [(each, _ours(renderer, each)) for each in reduced(conversation)]
        taken = [(each, found) for each, found in tried if not found.refused]
        form, compared = (taken or tried)[0]
        yield compared
        if taken and shows_reasoning(renderer, thoughtful := thinking(form)):
            yield _ours(renderer, thoughtful)


def _difference(renderer: HfRenderer, ours: Sequence[int], theirs: Sequence[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    before, mine, yours = (
        renderer.decode(ids)
        for ids in (ours[max(0, place - 4) : place], ours[place:], theirs[place:])
    )
    if mine[:24] == yours[:24]:
        return f"after {before!r}, both write {mine[:24]!r}, in other ids"
    return f"after {before!r}, the template writes {mine[:24]!r} and the cookbook {yours[:24]!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A renderer of the cookbook, and what ours makes of the conversations."""

    name: str
    model: str
    ours: HfRenderer
    tokenizer: Path
    compared: Sequence[_Compared]

    @property
    def question(self) -> str:
        """The line that `PROGRAM` reads."""
        chats = [chat for each in self.compared for chat in each.chats]
        about = {"tokenizer": str(self.tokenizer), "renderer": self.name, "chats": chats}
        return json.dumps(about)


def _tokenizer(data: Path, model: str) -> Any:
    folder, file = data / "tokenizers/qwen3", data / "chat_templates" / f"{model}.jinja"
    if model.startswith("tokenizers/"):
        folder, file = data / model, data / model / "chat_template.jinja"
    tokenizer = make_tokenizer(folder, model, file.read_text(encoding="utf-8"), keep=True)
    if (bos := _BOS.get(model.partition("-")[0])) is not None:
        tokenizer.add_tokens([bos], special_tokens=True)
        tokenizer.bos_token = bos
    return tokenizer


def _pairs(data: Path, place: Path) -> Iterator[_Pair]:
    """Renders by the templates; saves the tokenizers in folders below a place."""
    made: dict[str, Any] = {}
    for name, model, settings in PAIRS:
        folder = place / model.replace("/", "-")
        if model not in made:
            made[model] = _tokenizer(data, model)
            made[model].save_pretrained(folder)
        ours = HfRenderer(made[model], parser=AnyParser(), template_kwargs=settings)
        ours.template.shows_tools = True  # whether it does is not compared
        compared = list(_all_ours(ours))
        yield _Pair(name=name, model=model, ours=ours, tokenizer=folder, compared=compared)


def _verdict(
    pair: _Pair, compared: _Compared, theirs: Iterator[Sequence[int] | str]
) -> tuple[str, str]:
    """Returns the column of a conversation and the reason; takes the cookbook's prompts of it."""
    if compared.refused:
        return "refused", f"the template: {compared.refused}"
    prompts = list(itertools.islice(theirs, len(compared.ids)))
    for ids, other in zip(compared.ids, prompts, strict=True):
        if isinstance(other, str):
            return "refused", f"the cookbook: {other}"
        if list(ids) != other:
            return "other", _difference(pair.ours, ids, other)
    return "same", ""


def _row(pair: _Pair, answer: str) -> str:
    theirs = iter(json.loads(answer))
    found: defaultdict[str, list[str]] = defaultdict(list)
    reasons: dict[str, str] = {}
    for each in pair.compared:
        verdict, reason = _verdict(pair, each, theirs)
        found[verdict].append(each.name)
        # Once for those that differ in the texts alone.
        kind = re.sub(r"'([^']{0,4})[^']*'", r"\1", re.sub(r"^after '[^']*', ", "", reason))
        reasons.setdefault(kind, textwrap.shorten(reason, 160, placeholder=" ..."))
    columns = [", ".join(found[verdict]) for verdict in ("same", "other", "refused")]
    whole = ", ".join(each.name for each in pair.compared)
    columns = ["all" if column == whole else column for column in columns]
    return table_row(
        f"`{pair.name}`", pair.model, *columns, "; ".join(filter(None, reasons.values()))
    )


def make_table(data: Path, python: Path) -> str:
    """Returns the table."""
    with tempfile.TemporaryDirectory() as place:
        pairs = list(_pairs(data, Path(place)))
        done = subprocess.run(
            [python, PROGRAM],
            input="\n".join(pair.question for pair in pairs),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
    heads = ("renderer", "template", "same ids", "other ids", "refused", "where")
    rows = map(_row, pairs, done.stdout.splitlines())
    return "\n".join([table_row(*heads), "|---" * len(heads) + "|", *rows]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compares the cookbook's renderers with ours.")
    parser.add_argument("data", type=Path)
    parser.add_argument("python", type=Path)
    options = parser.parse_args()
    sys.stdout.write(make_table(options.data, options.python))
