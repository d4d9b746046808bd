"""Reading a report back: what must be true of every page and every picture."""

import re
import struct
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """What the tests ask of a page: its text, its tags balanced, its ids and its references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.refs.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def page_of(path: Path) -> Page:
    """Parse a page, and check what is true of every page."""
    text = path.read_text("utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert all(ref.startswith("#") and ref[1:] in page.ids for ref in page.refs)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"#[0-9a-f]{6}", text.split("</style>", 1)[1])  # every colour is a variable
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", page.text)
    assert not re.search(r"sparsity|droprate", page.text.lower())
    return page


def check_png(path: Path) -> None:
    """Walk a PNG's chunks and check their sums."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body, crc = data[at + 8 : at + 8 + length], data[at + 8 + length : at + 12 + length]
        assert struct.pack(">I", zlib.crc32(kind + body)) == crc
        kinds.append(kind)
        at += 12 + length
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
