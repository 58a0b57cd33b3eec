import re
from pathlib import Path

import pytest

from treadle.agent_loop.parsers import PARSER_NAMES
from treadle.trainer.config.describe import document, key_listing, value_listing
from treadle.trainer.config.keys import all_leaves, nearest
from treadle.trainer.config.load import load_config


def test_every_key_has_a_doc() -> None:
    assert [leaf.key for leaf in all_leaves().values() if not leaf.doc] == []


def test_the_listing_names_every_key_with_its_bounds() -> None:
    listing = key_listing()
    assert all(key in listing for key in all_leaves())
    assert "rollout.top_p  (number, > 0, <= 1; default 1.0)" in listing


def test_values_are_shown_with_their_source() -> None:
    loaded = load_config([], ["model.path=/m", "data.train_files=/t.jsonl", "rollout.top_k=3"])
    lines = value_listing(loaded).splitlines()
    (line,) = [line for line in lines if line.startswith("rollout.top_k")]
    assert line.split("#")[0].split() == ["rollout.top_k", "=", "3"]
    assert line.endswith("# rollout.top_k=3")


def test_the_document_is_current() -> None:
    """Mend with `python -m treadle.trainer.config.describe docs/config.md`."""
    for directory in Path(__file__).resolve().parents:
        path = directory / "docs" / "config.md"
        if path.exists():
            assert path.read_text(encoding="utf-8") == document()
            return
    pytest.fail("docs/config.md was not found above this file")


def test_each_section_is_one_part_of_the_document() -> None:
    headings = [line for line in document().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))


def test_the_nearest_keys_come_first() -> None:
    assert nearest("rollout.samples_per_promt", all_leaves())[0] == "rollout.samples_per_prompt"
    assert nearest("samples_per_prompt", all_leaves())[0].endswith("samples_per_prompt")
    assert nearest("zzzz", all_leaves()) == []
    # A section with a typing error: keys of other sections that end alike are no suggestion.
    assert nearest("schedulle.kind", all_leaves()) == ["schedule.kind"]


def test_every_parser_is_listed() -> None:
    doc = all_leaves()["agent.parser"].doc
    assert set(re.findall(r"\w+", doc)) >= set(PARSER_NAMES)
