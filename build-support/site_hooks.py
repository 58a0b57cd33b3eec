"""Hooks of the documentation site: pages from outside docs/, links and tables as on GitHub.

`nav` in mkdocs.yml may name what docs/ does not hold: another Markdown file, by its path in the
repository (`packages/tools/README.md`), or `reference/MODULE.md`, the API reference of a module.

A relative link means what it means on GitHub. It leads to the page that the site makes of the file
or, where there is none, to the file at `repo_url`. A link that leads nowhere stays as it is; a
strict build fails at it.

In a table, a bar in code is escaped for GitHub; the page has the bar alone.
"""

from __future__ import annotations

import posixpath
import xml.etree.ElementTree as etree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REFERENCE = "reference/"
# MkDocs turns links between sources into addresses at 0; before 20 there are no links yet.
AFTER_INLINE_BEFORE_MKDOCS = 10


class RepositoryLinks(Extension):
    """Makes links and tables of the page that is being rendered mean what they mean on GitHub.

    Attributes:
        root: The root of the repository.
        repo_url: Where its files are on the web.
        pages: The site's files, by their path in the repository.
        page: The file that is being rendered.
    """

    def __init__(self, root: Path, repo_url: str) -> None:
        super().__init__()
        self.root = root
        self.repo_url = repo_url.rstrip("/")
        self.pages: dict[str, File] = {}
        self.page: File | None = None

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers the rewriting with a Markdown instance."""
        md.treeprocessors.register(
            _Rewriting(self, md), "repository_links", AFTER_INLINE_BEFORE_MKDOCS
        )

    def repository_path(self, file: File) -> str | None:
        """Returns a file's path in the repository, or None if the file was generated."""
        if file.abs_src_path is None:
            return None
        path = Path(file.abs_src_path)
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else None

    def rewrite(self, link: str) -> str:
        """Returns the link that leads to the same file from the page that is being rendered."""
        parts = urlsplit(link)
        source = self.repository_path(self.page) if self.page else None
        if self.page is None or source is None:
            return link
        if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(parts.path)))
        page = self.pages.get(path) or self.pages.get(f"{path}/README.md")
        if page is not None:
            here = posixpath.dirname(self.page.src_uri)
            return parts._replace(path=posixpath.relpath(page.src_uri, here)).geturl()
        target = self.root / path
        if path.startswith("..") or not target.exists():
            return link
        kind = "tree" if target.is_dir() else "blob"
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"{self.repo_url}/{kind}/main/{path}{anchor}"


class _Rewriting(Treeprocessor):
    def __init__(self, links: RepositoryLinks, md: Markdown) -> None:
        super().__init__(md)
        self._links = links

    def run(self, root: etree.Element) -> None:
        for element in root.iter():
            for attribute in ("href", "src"):
                if link := element.get(attribute):
                    element.set(attribute, self._links.rewrite(link))
        for cell in root.iter("td"):
            for code in cell.iter("code"):
                code.text = AtomicString((code.text or "").replace(r"\|", "|"))


def _nav_pages(nav: Any) -> Iterator[str]:
    """Yields the Markdown files that a `nav` of mkdocs.yml names."""
    if isinstance(nav, str):
        if nav.endswith(".md"):
            yield nav
    elif nav:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _nav_pages(item)


def _links(config: MkDocsConfig) -> RepositoryLinks:
    extensions: list[object] = [*config.markdown_extensions]
    return next(each for each in extensions if isinstance(each, RepositoryLinks))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the rewriting of links to the Markdown extensions."""
    root = Path(config.config_file_path).parent
    extensions: list[Any] = config.markdown_extensions
    extensions.append(RepositoryLinks(root, config.repo_url or ""))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the navigation that are not in docs/."""
    links = _links(config)
    for name in _nav_pages(config.nav):
        if files.get_file_from_path(name) is not None:
            continue
        if name.startswith(REFERENCE):
            module = name.removeprefix(REFERENCE).removesuffix(".md")
            text = f"---\ntitle: {module}\n---\n\n::: {module}\n"
            files.append(File.generated(config, name, content=text))
        elif (links.root / name).is_file():
            folders = (config.site_dir, config.use_directory_urls)
            files.append(File(name, str(links.root), *folders))
    for file in files:
        if path := links.repository_path(file):
            links.pages[path] = file
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Notes which page is rendered next."""
    _links(config).page = page.file
    return markdown
