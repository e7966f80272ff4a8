"""What a purchase is worth to a customer: the formula of WebShop.

    reward = type * (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)

`attributes` and `options` count those of the goal that the purchase has, `price` is 1 if it is low enough.
`type` is 1 for the right kind of goods, less for others.

Source: Yao et al. 2022, arXiv:2207.01206; `web_agent_site/engine/goal.py` of princeton-nlp/WebShop. There,
nouns of a name are found by spaCy; here, its words count.
"""

from collections.abc import Mapping
from typing import Any

from recipes.webshop.shop_catalogue import Goal, Product

from astraflow.errors import ConfigError
from astraflow.user_input.extras import install_command

__all__ = ["check_installed", "purchase_reward"]

SAME = 85
"""Two texts whose `token_set_ratio` is above it are the same."""


def purchase_reward(bought: Product, options: Mapping[str, str], goal: Goal, wanted: Product) -> float:
    """The reward, 0 to 1, of buying a product with these options; `wanted` is the goal's own product."""
    num_right = _attributes(bought, goal) + _options(options, goal) + (bought.price <= goal.price_upper)
    num_asked = len(goal.attributes) + len(goal.options) + 1
    return _type(bought, wanted) * num_right / num_asked


def _type(bought: Product, wanted: Product) -> float:
    """How much the product is of the right kind."""
    words = set(wanted.name.split())
    shared = len(words & set(bought.name.split())) / len(words)
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    is_same = bought.name == wanted.name or len(set(bought.categories) & set(wanted.categories)) >= 2
    return 1.0 if is_same or shared > 0.2 else 0.5


def _attributes(bought: Product, goal: Goal) -> int:
    """How many of the attributes asked for it has, or says that it has."""
    return sum(
        any(_is_same(own, asked) for own in bought.attributes) or _is_told(bought, asked)
        for asked in goal.attributes
    )


def _options(options: Mapping[str, str], goal: Goal) -> int:
    """How many of the values asked for were chosen."""
    return sum(any(_is_same(chosen, asked) for chosen in options.values()) for asked in goal.options.values())


def _is_told(product: Product, text: str) -> bool:
    """Whether a page of the product has the text."""
    return any(
        text in told.lower() for told in (product.title, " ".join(product.features), product.description)
    )


def _is_same(one: str, other: str) -> bool:
    return _library().token_set_ratio(one, other) > SAME


def check_installed() -> None:
    """Raises: ConfigError with the command that installs what compares texts, if it is missing."""
    _library()


def _library() -> Any:
    try:
        from rapidfuzz import fuzz
    except ImportError as err:
        raise ConfigError(f"the world `shop` needs rapidfuzz: {install_command('webshop')}") from err
    return fuzz
