"""The sentences of a page of Markdown: what a reader reads as one, without code."""

from __future__ import annotations

import re


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs, items of lists, and cells of tables."""
    text = re.sub(r"^( *)```.*?^\1```[^\n]*$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "_").replace("|", "_"), text)
    # Each of these begins something new: an item, a row, a heading.
    text = re.sub(r"^ *(?:[-*]|\d+\.|#+|>) +", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\|.*$", lambda row: "\n" + row[0].replace("|", "\n\n") + "\n", text,
                  flags=re.MULTILINE)  # fmt: skip
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        found += re.split(r"(?<=[.!?])[\"')*]* (?=[\"'(*`_A-Za-z0-9])", words)
    return [sentence for sentence in found if re.search(r"\w", sentence)]
