"""The pages of the web shop of the world `shop`, as WebShop has them: an address goes in, HTML comes out.

    /SESSION                          what the customer wants, and a search bar
    /search_results/SESSION?...       goods, `page_size` per page
    /item_page/SESSION/ASIN?...       one product; its options lead to the same page with the option chosen
    /item_sub_page/SESSION/ASIN/...   its description, features or reviews
    /done/SESSION/ASIN?...            buys it; the page says what it was worth

What was searched and chosen is in the address, so any page can be asked for again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

from recipes.webshop.shop_catalogue import Goal, Product
from recipes.webshop.shop_reward import check_installed, purchase_reward

from astraflow.addons.search.retrieval.bm25 import Bm25
from astraflow.errors import DataError, QueryError

__all__ = ["MOST_QUERY", "Pages"]

MOST_RESULTS = 50
"""Goods that a search finds at most, as in WebShop."""
MOST_QUERY = 200
"""Characters of a search that count."""
SUB_PAGES = ("description", "features", "reviews")


@dataclass(frozen=True)
class _Visit:
    """What an address says."""

    session: str
    goal: Goal
    keywords: str
    page: int
    options: Mapping[str, str]

    def address(self, path: str, *, page: int = 0, options: Mapping[str, str] | None = None) -> str:
        """An address that says the same, but for what is given."""
        query = {"keywords": self.keywords, "page": str(page or self.page)}
        chosen = self.options if options is None else options
        if chosen:
            query["options"] = json.dumps(chosen)
        return f"{path}?{urlencode(query)}"


class Pages:
    """The pages of one catalogue for the customers who have come in.

    Example: `pages.begin("7", goal)`; then `pages.html("/7")` is the first page of that customer.
    """

    def __init__(self, catalogue: Sequence[Product], page_size: int) -> None:
        """Raises: ConfigError if a package of the extra `webshop` is missing."""
        check_installed()  # now, not at the first purchase
        self._catalogue = catalogue
        self._products = {product.asin: product for product in catalogue}
        self._page_size = page_size
        self._goals: dict[str, Goal] = {}
        self._index = Bm25.build(_searched(product) for product in catalogue)

    def begin(self, session: str, goal: Goal) -> None:
        """Lets a customer in."""
        self._goals[session] = goal

    def end(self, session: str) -> None:
        """Forgets a customer."""
        self._goals.pop(session, None)

    def html(self, address: str) -> str:
        """The page of an address. Raises: DataError if there is none."""
        split = urlsplit(address)
        parts = split.path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        match parts:
            case [session]:
                return self._start(self._visit(session, query))
            case ["search_results", session]:
                return self._results(self._visit(session, query))
            case ["item_page", session, asin]:
                return self._item(self._visit(session, query), self._product(asin))
            case ["item_sub_page", session, asin, sub] if sub in SUB_PAGES:
                return self._sub_page(self._visit(session, query), self._product(asin), sub)
            case ["done", session, asin]:
                return self._done(self._visit(session, query), self._product(asin))
            case _:
                raise DataError(f"{split.path[:80]!r} is no page of the shop")

    # --- pages --------------------------------------------------------------------------------------

    def _start(self, visit: _Visit) -> str:
        bar = f'<form action="/search_results/{visit.session}"><input id="search_input" name="keywords">'
        return _html(visit, [f'{bar}<button class="btn">Search</button></form>'])

    def _results(self, visit: _Visit) -> str:
        found = self._found(visit.keywords)
        last = max(1, -(-len(found) // self._page_size))
        if visit.page > last:
            raise DataError(f"page {visit.page} of {last} pages of results")
        here = f"/search_results/{visit.session}"
        body = [
            _button("Back to Search", f"/{visit.session}"),
            f"<p>Page {visit.page} (Total results: {len(found)})</p>",
        ]
        if visit.page > 1:
            body.append(_button("< Prev", visit.address(here, page=visit.page - 1)))
        if visit.page < last:
            body.append(_button("Next >", visit.address(here, page=visit.page + 1)))
        for product in found[(visit.page - 1) * self._page_size :][: self._page_size]:
            link = visit.address(f"/item_page/{visit.session}/{product.asin}")
            body.append(f'<a class="product-link" href="{escape(link)}">{product.asin}</a>')
            body += [f"<p>{escape(product.title)}</p>", f"<p>${product.price:.2f}</p>"]
        return _html(visit, body)

    def _item(self, visit: _Visit, product: Product) -> str:
        place = f"{visit.session}/{product.asin}"
        body = [
            _button("Back to Search", f"/{visit.session}"),
            _button("< Prev", visit.address(f"/search_results/{visit.session}", options={})),
        ]
        for kind, values in product.options.items():
            body.append(f"<h3>{escape(kind)}</h3>")
            for value in values:
                link = visit.address(f"/item_page/{place}", options={**visit.options, kind: value})
                radio = f'<input type="radio" name="{escape(kind)}" value="{escape(value)}"'
                checked = " checked" if visit.options.get(kind) == value else ""
                body.append(f'{radio} data-url="{escape(link)}"{checked}><label>{escape(value)}</label>')
        body += [f"<h2>{escape(product.title)}</h2>", f"<h4>Price: ${product.price:.2f}</h4>"]
        body.append("<h4>Rating: N.A.</h4>")
        for sub in SUB_PAGES:
            body.append(_button(sub.capitalize(), visit.address(f"/item_sub_page/{place}/{sub}")))
        return _html(visit, [*body, _button("Buy Now", visit.address(f"/done/{place}"))])

    def _sub_page(self, visit: _Visit, product: Product, sub: str) -> str:
        told = {"description": [product.description], "features": product.features, "reviews": ["None"]}[sub]
        back = visit.address(f"/item_page/{visit.session}/{product.asin}")
        body = [_button("Back to Search", f"/{visit.session}"), _button("< Prev", back)]
        return _html(visit, [*body, *(f"<p>{escape(text)}</p>" for text in told)])

    def _done(self, visit: _Visit, product: Product) -> str:
        reward = purchase_reward(product, visit.options, visit.goal, self._products[visit.goal.asin])
        thanks = ["<h1>Thank you for shopping with us!</h1>", "<h4>Your score (min 0.0, max 1.0)</h4>"]
        return _html(visit, [*thanks, f'<pre id="reward">{reward}</pre>'])

    # --- what addresses mean ------------------------------------------------------------------------

    def _visit(self, session: str, query: Mapping[str, str]) -> _Visit:
        if session not in self._goals:
            raise DataError(f"{session[:40]!r} is no session of the shop")
        page = query.get("page", "1")
        if not (page.isascii() and page.isdigit() and 0 < int(page[:4]) < 1000):
            raise DataError(f"page {page[:40]!r} is none from 1 to 999")
        options = _options(query.get("options", "{}"))
        keywords = query.get("keywords", "")[:MOST_QUERY]
        return _Visit(session, self._goals[session], keywords, int(page), options)

    def _product(self, asin: str) -> Product:
        if asin not in self._products:
            raise DataError(f"{asin[:40]!r} is no item of the shop")
        return self._products[asin]

    def _found(self, keywords: str) -> list[Product]:
        num = min(MOST_RESULTS, len(self._catalogue))
        try:
            return [self._catalogue[idx] for idx in self._index.search(keywords, num)]
        except QueryError:
            return []  # nothing but stop words or signs: a shop finds nothing then


def _searched(product: Product) -> str:
    options = [value for values in product.options.values() for value in values]
    return " ".join([product.title, *product.features, product.description, *options])


def _options(text: str) -> dict[str, str]:
    try:
        options: Any = json.loads(text)
    except ValueError as err:
        raise DataError(f"options {text[:80]!r} are no JSON") from err
    if not isinstance(options, dict):
        raise DataError(f"options {text[:80]!r} are no mapping")
    return {str(kind): str(value) for kind, value in cast("dict[Any, Any]", options).items()}


def _button(text: str, link: str) -> str:
    return f'<a class="btn" href="{escape(link)}">{escape(text)}</a>'


def _html(visit: _Visit, body: Sequence[str]) -> str:
    asked = f'<div id="instruction-text"><h4>Instruction:</h4><h4>{escape(visit.goal.instruction)}</h4></div>'
    head = "<!DOCTYPE html><html><head><title>WebShop</title></head>"
    return "\n".join([f"{head}<body>", asked, *body, "</body></html>"])
