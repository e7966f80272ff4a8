"""The world `shop`: its pages over HTTP, its reward, and how well those play who know it and who do not."""

import random
import statistics
import sys
from typing import Any

import aiohttp
import pytest
from recipes.webshop.shop_browser import read_page
from recipes.webshop.shop_catalogue import Goal, Product, make_catalogue
from recipes.webshop.shop_players import expert, random_player
from recipes.webshop.shop_reward import purchase_reward
from recipes.webshop.shop_teachers import demonstrations
from recipes.webshop.shop_world import Shop, action_in

from astraflow.errors import ConfigError, DataError
from drivers.shop_driver import open_shop, shop_rewards, take_odd_shop_steps

pytest.importorskip("bm25s", reason="needs bm25s (extra `webshop`)")
pytest.importorskip("rapidfuzz", reason="needs rapidfuzz (extra `webshop`)")

SHIRT = Product(
    asin="B000000001",
    name="shirt",
    categories=("clothing", "tops"),
    title="acorn machine wash shirt",
    attributes=("machine wash", "non slip"),
    options={"color": ("blue", "red"), "size": ("large", "small")},
    price=29.99,
    features=("machine wash shirt",),
    description="A shirt by acorn.",
)
GOAL = Goal("B000000001", ("machine wash",), {"color": "red", "size": "large"}, 40.0, "i need a shirt")


TINY: dict[str, Any] = {"num_items": 40, "page_size": 3, "max_turns": 8}


@pytest.mark.parametrize("shape", [{}, TINY], ids=["default", "tiny"])
async def test_the_expert_buys_what_is_asked_for_and_a_random_player_hardly_ever(
    shape: dict[str, Any],
) -> None:
    rng = random.Random(0)
    async with open_shop(**shape, size=40) as shop:
        assert statistics.mean(await shop_rewards(shop, expert, 40)) >= 0.99
        assert statistics.mean(await shop_rewards(shop, lambda seen: random_player(seen, rng), 40)) <= 0.10


@pytest.mark.parametrize(
    ("options", "changes", "reward"),
    [
        ({"color": "red", "size": "large"}, {}, 1.0),
        ({"color": "red", "size": "small"}, {}, 0.75),
        ({}, {}, 0.5),
        ({}, {"price": 50.0}, 0.25),
        (
            {"color": "red", "size": "large"},
            {"attributes": ("non slip",), "title": "x", "features": ()},
            0.75,
        ),
        ({"color": "red", "size": "large"}, {"name": "lamp", "categories": ("home", "lighting")}, 0.0),
        ({"color": "red", "size": "large", "brim": "red", "heel": "large"}, {}, 1.0),
    ],
)
def test_the_reward_is_webshops(options: dict[str, str], changes: dict[str, Any], reward: float) -> None:
    fields = {name: getattr(SHIRT, name) for name in SHIRT.__dataclass_fields__}
    assert purchase_reward(Product(**fields | changes), options, GOAL, SHIRT) == reward


async def test_a_visit_goes_from_search_to_purchase_over_http() -> None:
    async with open_shop(num_items=30, page_size=1, size=1) as shop:
        (task,) = shop.tasks("train")
        visit, seen = await shop.reset(task, seed=0)
        assert '"has_search_bar": true, "clickables": ["search"]' in str(seen.messages)
        await shop.step(visit, "Action: search[the !]")
        assert "Page 1 (Total results: 0)" in visit.page.text
        await shop.step(visit, "Action: click[Back to Search]")
        await shop.step(visit, "Thought:\nlook\n\nAction:\nsearch[shirt]")
        assert "Page 1 (Total results:" in visit.page.text
        await shop.step(visit, "Action: click[Next >]")
        assert "Page 2 (Total results:" in visit.page.text
        asin = next(text for text in visit.page.links if text.startswith("b0"))
        await shop.step(visit, f"Action: click[{asin}]")
        assert "Buy Now" in visit.page.texts
        await shop.step(visit, "Action: click[features]")
        await shop.step(visit, "Action: click[< prev]")
        unchanged = visit.page
        await shop.step(visit, "Action: click[no such thing]")
        assert visit.page is unchanged
        seen = await shop.step(visit, "Action: click[Buy Now]")
        assert seen.is_done
        assert 0.0 <= seen.reward <= 1.0


async def test_a_visit_may_begin_when_few_actions_are_left() -> None:
    async with open_shop(**TINY, actions_left=2, size=20) as shop:
        for task in shop.tasks("train"):
            visit, seen = await shop.reset(task, seed=0)
            assert "Buy Now" in str(seen.messages)
            seen = await shop.step(visit, "click[buy now]")
            assert seen.reward == 0.75
            shop.end(visit)
    async with open_shop(**TINY, actions_left=99, size=1) as shop:
        _, seen = await shop.reset(shop.tasks("train")[0], seed=0)
        assert str(seen.messages).endswith('{"has_search_bar": true, "clickables": ["search"]}')


async def test_no_reply_however_odd_raises() -> None:
    odd = ["", "Action:", "search[]", "search[ ]", "click[", "search[" + "x" * 1_000_000 + "]", "\x00\x1b[2J"]
    odd += [
        "search[<script>alert(1)</script>]",
        "click[../../etc/passwd]",
        "click[next >]",
        "search[the a of]",
    ]
    rng = random.Random(1)
    async with open_shop(num_items=50, size=20) as shop:
        await take_odd_shop_steps(shop, lambda seen: random_player(seen, rng), odd, 300)


async def test_pages_that_are_not_there_are_not_found() -> None:
    async with open_shop(num_items=5, size=1) as shop:
        site = shop._site.address  # pyright: ignore[reportPrivateUsage] - its address is nobody else's concern
        async with aiohttp.ClientSession() as session:
            for path in ("/", "/nobody", "/a/b/c/d/e/f", "/done/nobody/B000000001", "/../etc/passwd"):
                async with session.get(site + path) as answer:
                    assert answer.status == 404, path


@pytest.mark.parametrize(
    "query", ["page=0", "page=-1", "page=x", "page=99999", "page=9", "options=%5B", "options=%5B%5D"]
)
def test_addresses_that_mean_nothing_are_refused(query: str) -> None:
    pages = Shop(num_items=5, size=1).pages()
    pages.begin("1", GOAL)
    with pytest.raises(DataError):
        pages.html(f"/search_results/1?{query}")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought:\nx\n\nAction:\nsearch[Red Shirt]", ("search", "red shirt")),
        ("action: click[Buy Now] action: click[x]", ("click", "buy now")),
        ("click[b1]", ("click", "b1")),
        ("I click[b1]", ("", "")),
        ("", ("", "")),
    ],
)
def test_the_first_action_of_a_reply_counts(reply: str, action: tuple[str, str]) -> None:
    assert action_in(reply) == action


def test_text_of_goods_is_text() -> None:
    page = read_page('<a class="btn" href="/x">&lt;b&gt;</a><script>no()</script><pre id="reward">0.5</pre>')
    assert (page.texts, page.links, page.reward) == (["<b>", "0.5"], {"<b>": "/x"}, 0.5)


def test_the_same_seed_gives_the_same_goods_and_tasks() -> None:
    assert make_catalogue(1, 50) == make_catalogue(1, 50) != make_catalogue(2, 50)
    first, again, other = (Shop(size=50, seed=seed).tasks("train") for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(("module", "extra"), [("bm25s", "search"), ("rapidfuzz", "webshop")])
async def test_a_missing_package_is_told_when_the_shop_opens(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    shop = Shop(size=1)
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'astraflow\[{extra}\]'"):
        await shop.open()
    await shop.close()  # as the service does at its end


@pytest.mark.parametrize(
    "wrong", [{"num_items": 0}, {"max_turns": 0}, {"actions_left": -1}, {"heldout_frac": 0.0}]
)
def test_shops_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Shop(**wrong)


def test_teachers_choose_options_less_and_less() -> None:
    made = demonstrations(num=200, seed=1, careful_frac=(1.0, 0.0), num_items=100, page_size=3)
    num_turns = [len(one.conversation) // 2 for one in made]
    assert statistics.mean(num_turns[:40]) > 4.5 > 3.5 > statistics.mean(num_turns[-40:])
    assert made == demonstrations(num=200, seed=1, careful_frac=(1.0, 0.0), num_items=100, page_size=3)


def test_demonstrations_and_tasks_share_no_goal() -> None:
    shown = {str(visit.conversation[0].content) for visit in demonstrations(num=300, seed=0, num_items=40)}
    asked = {task.prompt for task in Shop(num_items=40, size=300).tasks("heldout")}
    assert not any(goal in page for goal in asked for page in shown)
