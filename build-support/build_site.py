"""Builds the documentation site into dist/site, or shows it and follows edits.

    ./pants run build-support/build_site.py
    ./pants run build-support/build_site.py -- --serve

Run it from the root of the repository.  A link or anchor that leads nowhere, and a page that `nav`
in mkdocs.yml does not name, fails the build.
"""

import argparse
import os


def main() -> None:
    """Calls MkDocs, strictly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--serve", action="store_true", help="show it at http://127.0.0.1:8000")
    what.add_argument("--out", metavar="DIR", help="build into DIR instead")
    options = parser.parse_args()
    arguments = ["serve"] if options.serve else ["build"]
    if options.out:
        arguments += ["--site-dir", options.out]
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # an advertisement of the theme
    from mkdocs.__main__ import cli  # reads the variable

    cli([*arguments, "--strict"])


if __name__ == "__main__":
    main()
