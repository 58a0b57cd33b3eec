r"""Writes docs/chat_templates.md: for which chat templates extending by turns is exact.

    ./pants run tests/chat_templates/table.py -- DATA docs/chat_templates.md

DATA holds `chat_templates/*.jinja` and `tokenizers/qwen3`. A template's own tokenizer is not at
hand, so each is tried with Qwen3's, to which the template's special tokens are added. Exits with 1
when something appended is not what a template writes.
"""

import argparse
import contextlib
import html
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from chat_templates.conversations import (
    CONVERSATIONS,
    REASONING,
    TOOLS,
    Conversation,
    reduced,
    thinking,
)
from chat_templates.fidelity import Finding, Verdict, compare
from treadle.agent_loop import RenderError, SetupError, ToolCall, ToolSpec
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.hf.template import PROBE_CALL, ChatTemplate
from treadle.agent_loop.parsers import ParsedText, parser_for_template

BAR = "\uff5c"  # the fullwidth bar of DeepSeek's tokens
_TOKENS = re.compile(
    r"<\|[\w:/.\"▁ -]{1,40}?\|>"
    rf"|<{BAR}[^{BAR}<>]{{1,40}}{BAR}>"
    r"|<\|(?:\"|\w+)>|<\w+\|>"
    r"|\[/?[A-Z][A-Z_]{2,}\]"
    r"|</?(?:start_of_turn|end_of_turn|sep|think|tool_call|tool_response|tool_calls|role|TOOLCALL)>"
    r"|</?(?:beginning|end)_of_sentence>|<SPECIAL_\d+>|</?seed:[a-z_:]+>|</?\w+:opensource>"
    r"|\]~b\]|\]~!b\[|\[e~\[|\]<\]minimax\[>\[|</?mm:think>|</?minimax:tool_call>"
)
_LAGUNA_TOKENS = re.compile(r"</?(?:assistant|user|system)>")
_DEEPSEEK_EOS = f"<{BAR}end▁of▁sentence{BAR}>"
# What a model's tokenizer_config.json calls its end of sequence, by a part of the file's name.
_EOS = {
    "apertus": "<|assistant_end|>",
    "apriel": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "glm": "<|endoftext|>",
    "minimax-m1": "<end_of_sentence>",
    "minimax": "[e~[",
    "nemotron-nano-v2": "<SPECIAL_12>",
    "gemma": "<eos>",
    "granite": "<|end_of_text|>",
    "seed": "<seed:eos>",
    "gpt-oss": "<|return|>",
    "phi": "<|endoftext|>",
    "deepseek": _DEEPSEEK_EOS,
    "hermes": "<|im_end|>",
    "llama-3": "<|eot_id|>",
    "functionary": "<|eot_id|>",
    "mistral": "</s>",
    "ministral": "</s>",
    "gigachat": "<|message_sep|>",
    "kimi-k3": "<|end_of_msg|>",
    "solar": "<|end|>",
    "spark": _DEEPSEEK_EOS,
    "hy3": f"<{BAR}hy_eos:opensource{BAR}>",
    "reka": "<sep>",
    "ling": "<|role_end|>",
    "laguna": "</assistant>",
    "muse": "<|eot|>",
}
_BOTH = (Verdict.EXACT, Verdict.PAST)
_HEAD = """\
# Chat templates

Which chat templates the renderer (`treadle.agent_loop.hf`) extends exactly. Written by
`tests/chat_templates/table.py`; do not edit.

Each template is tried with the conversations of `tests/chat_templates/conversations.py`, without
and with a reasoning before each turn (`+r`, where the template shows it). Every conversation is
rendered twice: turn by turn, as `HfRenderer` does it around what was sampled, and whole, by
`apply_chat_template`. The sampled turns are those that the template writes.

| column | meaning |
|---|---|
| exact | the ids are the same, at every turn |
| past | what is appended is the same, but the template rewrites what is past; the reason says how.\
 The transcript keeps what was sampled, and the drift report shows the place |
| refused | an error says why, from the template or from `extend` |
| split | the template writes a part of a turn behind the turn's end: no model samples it as one |

The parser is the one that `parser_for_template` finds; "none" means that no parser reads the calls,
or that the template does not show tools; a conversation with tools is refused for that reason.

"""


def make_tokenizer(directory: Path, name: str, template: str, *, keep: bool = False) -> Any:
    """A real tokenizer which knows a template and its special tokens.

    Args:
        keep: Whether a token that the tokenizer has stays special or not, as it is there.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    tokens = _TOKENS.findall(template)
    if "Laguna" in name:
        tokens += _LAGUNA_TOKENS.findall(template)
    eos = next((eos for part, eos in _EOS.items() if part in name.lower()), "<|im_end|>")
    known = tokenizer.get_vocab() if keep else {}
    tokens = [token for token in [*tokens, eos, "<bos>"] if token not in known]
    tokenizer.add_tokens(list(dict.fromkeys(tokens)), special_tokens=True)
    tokenizer.eos_token = eos
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    # Some templates put the names of their tokens together.
    with contextlib.suppress(RenderError, SetupError):
        text = ChatTemplate(tokenizer, {}).text(CONVERSATIONS[2].messages, TOOLS, open_turn=True)
        tokens = [token for token in _TOKENS.findall(text) if token not in known]
        tokenizer.add_tokens(list(dict.fromkeys(tokens)), special_tokens=True)
    return tokenizer


def findings(renderer: HfRenderer, tokenizer: Any) -> Iterator[Finding]:
    """Tries all conversations; in a form that the template takes, if there is one."""
    for conversation in CONVERSATIONS:
        found = None
        for simpler in reduced(conversation):
            found = compare(renderer, tokenizer, simpler)
            if found.verdict is not Verdict.REFUSED:
                yield found
                thoughtful = thinking(simpler)
                if shows_reasoning(renderer, thoughtful):
                    yield compare(renderer, tokenizer, thoughtful)
                break
        else:
            assert found is not None
            yield found


def shows_reasoning(renderer: HfRenderer, conversation: Conversation) -> bool:
    """Whether the reasoning is in the text of one of the turns, while that is the last."""
    tools, messages = TOOLS if conversation.tools else (), conversation.messages
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    try:
        texts = (renderer.template.text(messages[: i + 1], tools, open_turn=False) for i in turns)
        return any(REASONING in text for text in texts)
    except RenderError:
        return True


class AnyParser:
    """Reads every text as the call that shows whether a parser fits; this tries templates only."""

    stop_tokens: tuple[str, ...] = ()

    def parse(
        self, text: str, *, tools: Sequence[ToolSpec] = (), prompt_end: str = ""
    ) -> ParsedText:
        return ParsedText(content="", calls=(PROBE_CALL,), call_starts=(0,))

    def render(self, content: str, calls: Sequence[ToolCall], *, reasoning: str = "") -> str:
        raise NotImplementedError


def _parser_name(tokenizer: Any, template: str) -> str:
    name = parser_for_template(template)
    try:
        HfRenderer(tokenizer, parser=name).render(CONVERSATIONS[1].messages[1:2], tools=TOOLS)
    except (SetupError, RenderError):
        return "none"
    return name or "none"


def row(name: str, directory: Path, template: str) -> tuple[str, list[Finding]]:
    """One row of the table, and what it says."""
    tokenizer = make_tokenizer(directory, name, template)
    parser = _parser_name(tokenizer, template)
    try:
        renderer = HfRenderer(tokenizer, parser=AnyParser())
    except SetupError as error:
        return table_row(name, parser, "", "", "all", "", str(error)), []
    renderer.template.shows_tools = True  # whether it does is not compared
    found = list(findings(renderer, tokenizer))
    shapes = [
        ", ".join(f.conversation for f in found if f.verdict is verdict)
        for verdict in (Verdict.EXACT, Verdict.PAST, Verdict.REFUSED, Verdict.SPLIT)
    ]
    everything = ", ".join(f.conversation for f in found)
    columns = ["all" if shape == everything else shape for shape in shapes]
    return table_row(name, parser, *columns, "; ".join(_reasons(found))), found


def _reasons(found: Iterable[Finding]) -> list[str]:
    """Each cause once; of those that only differ in the texts, the first."""
    causes: dict[str, str] = {}
    for finding in found:
        if finding.cause:
            causes.setdefault(re.sub(r"'[^']*'", "", finding.cause), finding.cause)
    return list(causes.values())


def table_row(*cells: str) -> str:
    """Returns a row of a table; what a cell quotes is neither HTML nor a link."""
    texts = (html.escape(cell, quote=False).replace("[", "&#91;") for cell in cells)
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _summary(found: Mapping[str, list[Finding]]) -> str:
    kinds = [{finding.verdict for finding in findings} for findings in found.values()]
    exact = sum(kind == {Verdict.EXACT} for kind in kinds)
    past = sum(Verdict.PAST in kind and kind <= {Verdict.EXACT, Verdict.PAST} for kind in kinds)
    none = sum(not kind for kind in kinds)
    rendered = sum(f.verdict in _BOTH for findings in found.values() for f in findings)
    some = len(kinds) - exact - past - none
    return (
        f"Of {len(kinds)} templates, {exact} are exact over every conversation; {past} more are in "
        f"what is appended, but rewrite what is past; {some} do not take some conversations; "
        f"{none} are refused when they are loaded. In none of {rendered} conversations that "
        "were rendered in both ways was anything appended that the template does not write.\n\n"
    )


def main() -> int:
    """Writes the page."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("data", type=Path)
    arguments.add_argument("page", type=Path)
    options = arguments.parse_args()
    lines, found = [], {}
    for file in sorted((options.data / "chat_templates").glob("*.jinja")):
        line, found[file.stem] = row(file.stem, options.data / "tokenizers/qwen3", file.read_text())
        lines.append(line)
    wrong = [(n, f) for n, fs in found.items() for f in fs if f.verdict is Verdict.WRONG]
    for name, finding in wrong:
        print(f"{name}: {finding}", file=sys.stderr)  # noqa: T201
    if wrong:
        return 1
    heads = ("template", "parser", "exact", "past", "refused", "split", "reason")
    table = [table_row(*heads), "|---" * len(heads) + "|", *lines]
    page = _HEAD + _summary(found) + "\n".join(table) + "\n"
    options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
