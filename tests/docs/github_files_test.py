"""CITATION.cff and the issue forms have what GitHub and the citation format ask for."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
# https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md
CITATION_KEYS = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi"),
    *("identifiers", "keywords", "license", "license-url", "message", "preferred-citation"),
    *("references", "repository", "repository-artifact", "repository-code", "title", "type"),
    *("url", "version"),
}
AUTHOR_KEYS = {"family-names", "given-names", "name", "affiliation", "orcid", "website"}


def test_the_citation_is_of_format_1_2_0() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation.keys() <= CITATION_KEYS
    assert citation["type"] in ("software", "dataset")
    assert citation["authors"]
    for author in citation["authors"]:
        assert author.keys() <= AUTHOR_KEYS
        assert author.keys() & {"name", "family-names", "given-names"}
    assert all(isinstance(keyword, str) for keyword in citation["keywords"])
    for key in ("url", "repository-code"):
        assert re.fullmatch(r"https://\S+", citation[key])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form.keys() == {"blank_issues_enabled", "contact_links"}
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    for part in form["body"]:
        assert part["type"] in ("input", "textarea", "dropdown")
        assert part["attributes"]["label"]
        assert ("options" in part["attributes"]) == (part["type"] == "dropdown")


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [path.stem for path in FORMS] == ["bug", "config", "feature", "question"]
