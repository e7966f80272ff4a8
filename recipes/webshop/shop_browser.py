"""Reads pages of a shop: their text, what can be clicked, whether there is a search bar, and the reward."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["Page", "read_page"]

_HIDDEN = frozenset({"head", "script", "style", "title"})


@dataclass
class Page:
    """What a customer sees."""

    texts: list[str] = field(default_factory=list[str])
    links: dict[str, str] = field(default_factory=dict[str, str])
    """What can be clicked, in small letters, and where it leads."""
    search: str = ""
    """Where a search is sent; empty: the page has no search bar."""
    reward: float | None = None
    """What the purchase was worth; None on all pages but the last one."""

    @property
    def text(self) -> str:
        """All that can be read, as WebShop's simple text mode has it."""
        return " [SEP] ".join(self.texts)

    @property
    def clickables(self) -> list[str]:
        """What can be clicked; a search bar's button counts, as in WebShop."""
        return [*(["search"] if self.search else []), *self.links]


def read_page(html: str) -> Page:
    """Reads a page; what is not marked as a link, an option or a search bar is text."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.page


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._open: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "input":  # it has no end tag
            if given.get("type") == "radio":
                self.page.links[given.get("value", "").lower()] = given.get("data-url", "")
            return
        if tag == "form":
            self.page.search = given.get("action", "")
        self._open.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        text = data.strip()
        if not text or any(tag in _HIDDEN for tag, _ in self._open):
            return
        self.page.texts.append(text)
        tag, given = self._open[-1] if self._open else ("", {})
        if tag == "a":
            self.page.links[text.lower()] = given.get("href", "")
        if given.get("id") == "reward":
            self.page.reward = float(text)
