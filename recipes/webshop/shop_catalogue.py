"""The goods of the world `shop`, and what its customers want: both are drawn from a seed.

i need a machine wash shirt with color: red, and size: large, and price lower than 40.00 dollars
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Goal", "Product", "make_catalogue", "make_goal"]

KINDS = {
    "shirt": ("clothing", "tops"),
    "jacket": ("clothing", "tops"),
    "skirt": ("clothing", "bottoms"),
    "sneakers": ("shoes", "sport"),
    "boots": ("shoes", "outdoor"),
    "lamp": ("home", "lighting"),
    "pillow": ("home", "bedding"),
    "blanket": ("home", "bedding"),
    "backpack": ("luggage", "bags"),
    "umbrella": ("luggage", "rain"),
    "headphones": ("electronics", "audio"),
    "speaker": ("electronics", "audio"),
}
"""Every kind of goods, and its categories from the widest to the narrowest."""
ATTRIBUTES = (
    "machine wash", "long lasting", "easy clean", "light weight", "water resistant", "non slip", "heavy duty",
    "hand made",
)  # fmt: skip
"""What a product may be praised for; a product has two."""
OPTIONS = {
    "color": ("red", "blue", "green", "black", "white", "yellow", "purple", "brown"),
    "size": ("tiny", "small", "medium", "large", "huge"),
}
"""What a customer chooses; a product has three values of each. No two are so alike (as large and xlarge are)
that WebShop's reward takes one for the other."""
BRANDS = ("acorn", "bluebird", "cedar", "delta", "ember", "fjord", "grove", "harbor")
PRICES = tuple(number + 0.99 for number in range(5, 95, 5))
PRICE_STEPS = tuple(10.0 * number for number in range(1, 100))
"""What customers say that they want to pay at most, as in WebShop."""


@dataclass(frozen=True)
class Product:
    """What can be bought."""

    asin: str
    """Its number, which is how pages name it."""
    name: str
    """The kind of goods; WebShop calls it the query under which the product was found."""
    categories: tuple[str, ...]
    title: str
    attributes: tuple[str, ...]
    options: Mapping[str, Sequence[str]]
    price: float
    """US dollars; the same whatever is chosen."""
    features: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class Goal:
    """What a customer wants."""

    asin: str
    """A product that has all of it; others may be as good."""
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    instruction: str


def make_catalogue(seed: int | str, num: int) -> list[Product]:
    """Draws products, in the order of their numbers."""
    rng = random.Random(f"catalogue {seed}")
    return [_product(rng, idx) for idx in range(num)]


def _product(rng: random.Random, idx: int) -> Product:
    name = rng.choice(list(KINDS))
    attributes = tuple(sorted(rng.sample(ATTRIBUTES, 2)))
    options = {kind: tuple(sorted(rng.sample(values, 3))) for kind, values in OPTIONS.items()}
    brand = rng.choice(BRANDS)
    return Product(
        asin=f"B{idx:09d}",
        name=name,
        categories=KINDS[name],
        title=f"{brand} {attributes[0]} {name}",
        attributes=attributes,
        options=options,
        price=rng.choice(PRICES),
        features=tuple(f"{attribute} {name}" for attribute in attributes),
        description=f"A {name} by {brand}, {attributes[0]} and {attributes[1]}.",
    )


def make_goal(rng: random.Random, catalogue: Sequence[Product]) -> Goal:
    """Draws what a customer wants: an attribute of a product, one value of each option, and a price above its
    own."""
    product = rng.choice(catalogue)
    attributes = (product.attributes[0],)
    options = {kind: rng.choice(values) for kind, values in product.options.items()}
    above = [price for price in PRICE_STEPS if price > product.price][:4]
    price_upper = max(rng.sample(above, 2))
    chosen = ", and ".join(f"{kind}: {value}" for kind, value in options.items())
    instruction = (
        f"i need a {attributes[0]} {product.name} with {chosen}, "
        f"and price lower than {price_upper:.2f} dollars"
    )
    return Goal(product.asin, attributes, options, price_upper, instruction)
