"""Links between Markdown pages: files and headings exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the Markdown files of the repository, without raw results."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if not name.startswith("bench/results/")]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as forges and mkdocs make them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\s-]", "", plain).strip()
        found |= {re.sub(r"\s", "-", slug), re.sub(r"[\s-]+", "-", slug)}
    return found


def broken_links(page: Path, root: Path = ROOT) -> list[str]:
    """Return the relative links of a page with a missing target file or heading."""
    text = page.read_text()
    broken = []
    for plain, attribute in LINK.findall(FENCE.sub("", text)):
        link = plain or attribute
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or link.startswith("/"):
            continue
        target = page if not name else (page.parent / name).resolve()
        if not target.exists():
            broken.append(f"{page.relative_to(root)}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            broken.append(f"{page.relative_to(root)}: {link}: no such heading")
    return broken


def test_links_lead_to_files_and_headings() -> None:
    assert [broken for page in pages() for broken in broken_links(page)] == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A title, `code`\n\n[x](b.md) [y](#a-title-code) [z](#none) [w](https://x.y)\n")
    assert broken_links(page, tmp_path) == ["a.md: b.md: no such file", "a.md: #none: no such heading"]
