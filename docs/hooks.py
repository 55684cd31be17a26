"""Hook of mkdocs: show links to files outside docs/ as plain text, since the site does not contain them."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#:]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page with links that leave docs/ replaced by their text."""
    docs = Path(config["docs_dir"]).resolve()
    source = docs / page.file.src_path

    def replace(match: re.Match[str]) -> str:
        is_inside = (source.parent / match[2]).resolve().is_relative_to(docs)
        return match[0] if is_inside else match[1]

    return _LINK.sub(replace, markdown)
