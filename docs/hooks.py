"""mkdocs hook: files of the repository that pages link to become part of the site, at their own paths.

A page is written for two readers. On a code host its relative links lead to files of the repository. In the site a link
that leaves docs/pages leads to a copy of that file: a page if it is Markdown, else the file itself. So `mkdocs build --strict`
checks these links and their anchors like every other.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = "docs/pages/"
FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def in_site(path: str) -> str:
    """Return the address in the site of a file of the repository.

    >>> in_site("docs/pages/faq.md"), in_site("ci/test.sh"), in_site("README.md")
    ('faq.md', 'ci/test.sh', 'index.md')
    """
    return "index.md" if path == "README.md" else path.removeprefix(PAGES)


def in_repository(address: str) -> str:
    """Return the file of the repository that an address of the site stands for.

    >>> in_repository("faq.md"), in_repository("recipes/landing/README.md")
    ('docs/pages/faq.md', 'recipes/landing/README.md')
    """
    return address if (ROOT / address).is_file() and address != "README.md" else PAGES + address


def plain(text: str) -> str:
    """Return a page's text with its code blanked out, character for character."""
    return CODE.sub(lambda m: " " * len(m[0]), FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text))


def links(text: str, page: str) -> Iterator[tuple[re.Match, str]]:
    """Yield (match, file of the repository) for each relative link of a page that leads to a file.

    Args:
        text: the page.
        page: its path in the repository.
    """
    for match in LINK.finditer(plain(text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        if (ROOT / target).is_file():
            yield match, target


def on_files(files: Files, config) -> Files:
    """Add every file of the repository that a page links to, and what those pages link to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = in_repository(waiting.pop())
        for _, target in links((ROOT / page).read_text(), page):
            address = in_site(target)
            if files.get_file_from_path(address) is None:
                files.append(File.generated(config, address, abs_src_path=str(ROOT / target)))
                waiting += [address] if address.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Write each link to a file of the repository as the site has it."""
    address = page.file.src_uri
    changes = [
        (match.span(2), posixpath.relpath(in_site(target), posixpath.dirname(address) or "."))
        for match, target in links(markdown, in_repository(address))
    ]
    for (start, end), link in reversed(changes):
        markdown = markdown[:start] + link + markdown[end:]
    return markdown
