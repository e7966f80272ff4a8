"""Writes the recipe reference from the config classes: docs/recipes.md, and a page per section next to it.

Every config class that a recipe can reach has one place: the page of the section where it is found first. The
spec of a tiny model, which is a separate file, has its own page. With `--check`, nothing is written, and the
exit code is 1 if a page is missing, left over, or not up to date.
"""

import ast
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from astraflow.addons.tiny_models.spec import ModelSpec
from astraflow.config import Config, Use
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import MAY_CHANGE, MAY_COME_OR_GO

DOCS = Path(__file__).resolve().parent.parent / "docs"
INDEX = "recipes.md"
GENERATED = "*Generated from the config classes by `make docs`; do not edit.*"
HEAD = f"""# Recipe reference

{GENERATED}

A recipe is one YAML file that describes a complete run. It has these sections; each has a page of its own.

"""
RULES = """
## Writing a recipe

- **Paths.** Paths of models and data are relative to the folder that you run the command in.
- **One policy.** A recipe with one policy can have `model`, `renderer`, `sampling`, `table`, `template_args`
  and `train` at the top instead of under `policies.NAME`. The policy is called `actor`.
- **Extending.** `extends: other.yaml` starts from another recipe, whose path is relative to this file. Within
  `policies`, `extends: NAME` starts from another policy. Sections are merged key by key, but an empty section
  (`eval.sets={}`) replaces what was there. If a recipe names other trained policies than the one that it
  extends, they replace those, except for policies that its workflow, a judge, or `follows` still names.
- **Overrides.** On the command line, `a.b.c=value` overrides one key. With one policy, `train.lr=1e-4` is
  short for `policies.NAME.train.lr=1e-4`.
- **Variants.** Where a section has several variants, `name` chooses one. `{use: "module:attr", args: {...}}`
  puts a component of your own in its place; its arguments are checked against its signature. A name alone is
  short for a section without further keys: `loss: gspo` for `loss: {name: gspo}`, and `"module:attr"` for
  `{use: "module:attr"}`.
- **Mistakes.** An unknown key is an error that names the nearest valid one. Names that TRL and verl give a
  setting (`learning_rate`, `num_generations`, `kl_coef`) are answered with the key that it has here.
- **Resuming.** A run can be resumed with other values of [some keys](recipes/may_change.md) only; with more
  steps, it is [trained longer](longer.md).

## From a recipe to a run

A recipe is resolved in this order. `astraflow run RECIPE --dry-run` prints the result.

1. The file and those that it extends are read and merged, from the lowest to the top. In each, keys of a
   policy at the top move under `policies`.
2. Policies that a higher file replaces are left out.
3. Overrides are applied, and then `extends` within `policies`.
4. Short forms of variants get their `name`, other keys get their defaults, and every value is checked.
5. `scale=smoke` shrinks the result. The overrides are applied to it again.
6. Models, tasks and components are checked.
7. A number replaces each `auto`.

"""
MAY_CHANGE_HEAD = f"""# Recipe: keys that may change

{GENERATED}

`astraflow run` with the folder of a run resumes it, and [trains it longer](../longer.md) if it has more steps
to do. These keys, and all keys below them, may then have other values; the change is noted in
`recipe_changes.jsonl` in the run folder. A change of any other key is refused, because the journal already
holds data that the former value decided.

Sections that may be added or removed as a whole, but not changed:
{", ".join(f"`{key}`" for key in MAY_COME_OR_GO)}.

"""
SPEC_HEAD = f"""# The spec of a tiny model

{GENERATED} [Recipe reference](../{INDEX}).

`astraflow model init SPEC.yaml --out FOLDER [a.b=value]...` builds a tiny Qwen3-shaped model with a
character tokenizer and a chat template, teaches it a partial skill by supervised learning on
**demonstrations**, and writes it as an ordinary Hugging Face folder. Reinforcement learning then has
something to find and something to improve. The specs of the example recipes are in `recipes/models/`. A
spec of your own:

<!-- not run: it is not a recipe; tests/unit/models/test_spec_page.py builds it -->
```yaml
name: copier
seed: 0
architecture: {{hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, mlp_size: 128}}
tokenizer: {{characters: "abcdefghijklmnopqrstuvwxyz :?", words: ["copy: "]}}
demonstrations: {{use: "my_demonstrations:copies", args: {{length: 5}}}}
warm_start: {{steps: 300, batch_size: 64, lr: 0.015}}
```

A maker of demonstrations is a function. It is called with `num`, `seed` and the `args` of the spec, and
returns `num` prompts with replies; the same arguments must give the same ones. `my_demonstrations.py`
has to lie where Python finds it:

```python
import random

from astraflow.addons.tiny_models.demonstrations import Demonstration


def copies(num: int, seed: int, length: int = 5) -> list[Demonstration]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for _ in range(num)]
    # Half of the replies are wrong, so that the model knows the task and seldom does it.
    return [Demonstration(f"copy: {{word}}?", word if rng.random() < 0.5 else word[::-1]) for word in words]
```

Every character of prompts and replies must be in `tokenizer.characters`, or in one of its `words`.
Prompt, reply and two marks must fit into `architecture.max_positions` tokens. To train a model of
another family, [start from a downloaded folder](../models.md).

With `base` instead of `architecture` and `tokenizer`, as in `recipes/models/smollm2-sums.yaml`, a copy of a
pretrained model learns the demonstrations in its own chat template.

"""


@dataclass(frozen=True)
class Page:
    """One page of the reference: the sections that start at its keys, up to the next page's keys."""

    name: str
    title: str
    keys: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path relative to docs/."""
        return f"recipes/{self.name}.md" if self.name else INDEX


OVERVIEW = Page("", "the whole", ("",))
PAGES = (
    Page("tasks", "tasks", ("tasks",)),
    Page("curators", "curators", ("tasks.curators",)),
    Page("workflow", "workflow", ("workflow",)),
    Page("policies", "policies and sampling", ("policies",)),
    Page("table", "tables", ("policies.table",)),
    Page(
        "credit",
        "filters, shaping and credit",
        ("policies.table.filters", "policies.table.shaping", "policies.table.credit"),
    ),
    Page("train", "training and backends", ("policies.train",)),
    Page("losses", "losses", ("policies.train.loss",)),
    Page("auxiliary", "corrections, KL, critic and other models", ("policies.train.auxiliary",)),
    Page("rollout", "rollout and engines", ("rollout",)),
    Page("eval", "evaluation and stop", ("eval", "stop")),
    Page("dataflow", "dataflow", ("dataflow",)),
    Page("weights", "weights", ("weights",)),
    Page("trackers", "trackers", ("trackers",)),
    Page("supervision", "supervision, launcher and cluster", ("supervision", "launcher", "cluster")),
)
SPEC = Page("model_spec", "the spec of a tiny model", ("SPEC",))


@dataclass(frozen=True)
class Place:
    """Where a config class is described: the first key that can hold it, such as `policies.train.loss`."""

    config: type[Config]
    key: str

    @property
    def page(self) -> Page:
        """The page with the longest key that this place is at or below."""
        if self.config is Use:
            return OVERVIEW
        fits = [
            (len(key), page)
            for page in (OVERVIEW, *PAGES, SPEC)
            for key in page.keys
            if not key or f"{self.key}.".startswith(f"{key}.")
        ]
        return max(fits, key=lambda fit: fit[0])[1]

    @property
    def variant(self) -> str:
        """The `name` that selects the variant; empty if the class isn't a variant."""
        field = self.config.model_fields.get("name")
        return field.default if field and get_origin(field.annotation) is typing.Literal else ""

    @property
    def title(self) -> str:
        """The heading, for example `loss: grpo`, or `optimizer` for a section without variants."""
        if self.config is Use:
            return "Your own component"
        last = self.key.rpartition(".")[2]
        return f"{last}: {self.variant}" if self.variant else last

    @property
    def anchor(self) -> str:
        """The anchor of the heading, as GitHub and MyST make it."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    def link_from(self, page: Page) -> str:
        """Returns a relative link to the heading."""
        if page == self.page:
            return f"#{self.anchor}"
        return f"{relative(self.page.path, page)}#{self.anchor}"


def relative(path: str, page: Page) -> str:
    """Converts a path below docs/ to a link from a page."""
    if page == OVERVIEW:
        return path
    return path.removeprefix("recipes/") if path.startswith("recipes/") else f"../{path}"


def configs_in(annotation: Any) -> list[type[Config]]:
    """Returns the config classes within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [c for arg in get_args(annotation) for c in configs_in(arg)]


def fields_below(config: type[Config]) -> Iterator[tuple[str, type[Config]]]:
    """Yields (field name, config class) for everything that a class's fields can hold."""
    for name, field in config.model_fields.items():
        for annotation in (field.annotation, *field.metadata):
            for inner in configs_in(annotation):
                yield name, inner


@cache
def places() -> dict[type[Config], Place]:
    """Returns every class that a recipe can reach, in the order of the keys."""
    found: dict[type[Config], Place] = {}

    def visit(config: type[Config], key: str) -> None:
        if config in found:
            return
        found[config] = Place(config, key)
        for name, inner in fields_below(config):
            visit(inner, f"{key}.{name}".lstrip("."))

    visit(Recipe, "")
    visit(ModelSpec, "SPEC")
    return found


def type_text(annotation: Any, page: Page) -> str:
    """Formats a type as a reader of YAML sees it."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is typing.Annotated:
        return type_text(args[0], page)
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(dict.fromkeys(type_text(a, page) for a in args))
    if origin is tuple:
        inner = [type_text(a, page) for a in args if a is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in args else f"list [{', '.join(inner)}]"
    if origin is dict:
        return f"mapping name → {type_text(args[1], page)}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        place = places()[annotation]
        label = f"`{place.variant}`" if place.variant else place.title
        return f"[{label}]({place.link_from(page)})"
    names = {str: "text", int: "integer", float: "number", bool: "true/false"}
    return names.get(annotation, "any value")


def default_text(default: Any, factory: Any) -> str:
    """Formats a default as in YAML."""
    if default is PydanticUndefined:
        return "`{}`" if factory is not None else "required"
    if isinstance(default, Config):
        return f"`{default.name}`" if "name" in type(default).model_fields else "defaults"
    if isinstance(default, tuple):
        return "`[" + ", ".join(default_text(d, None).strip("`") for d in default) + "]`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return code(repr(default)) if isinstance(default, str) else f"`{default}`"


def code(text: str) -> str:
    """Formats a text as inline code, between more backticks than it has in a row."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def bounds_text(metadata: list[Any]) -> str:
    """Formats the bounds of a number, for example `(>= 1)`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [
        f"{sign} {getattr(m, key):g}" for m in metadata for key, sign in signs.items() if hasattr(m, key)
    ]
    return f" ({', '.join(parts)})" if parts else ""


def meaning_text(config: type[Config], name: str) -> str:
    """Returns a field's own docstring, or that of the section that it holds; for a variant's name, the
    variant's."""
    field = config.model_fields[name]
    inner = configs_in(field.annotation)
    text = field_docs(config).get(name) or (inner[0].__doc__ if len(inner) == 1 else "") or ""
    if name == "name" and get_origin(field.annotation) is typing.Literal:
        text = "Chooses this variant."
    return " ".join(text.split())


@cache
def field_docs(config: type[Config]) -> dict[str, str]:
    """Returns the docstrings of a class's fields, its own and the inherited ones."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, Config):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for statement, after in itertools.pairwise(tree.body):
                match statement, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        docs[name] = inspect.cleandoc(text)
    return docs


def dotted(config: type[Config]) -> str:
    """Returns a class's name as Python imports it."""
    return f"{config.__module__}.{config.__name__}"


def table(config: type[Config], page: Page) -> list[str]:
    """Returns the keys of one class."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in config.model_fields.items():
        kind = type_text(field.annotation, page) + bounds_text(field.metadata)
        default = default_text(field.default, field.default_factory)
        rows.append(f"| `{name}` | {kind} | {default} | {meaning_text(config, name)} |")
    return rows


def section(place: Place) -> str:
    """Describes one class: a heading, its docstring, and the table of its keys."""
    config = place.config
    # A mapping from names, such as `policies`, is shown as `*` in a key.
    key = re.sub(r"\b(policies|sources|sets)(?=\.|$)", r"\1.*", place.key)
    whole = "The whole file" if config is ModelSpec else f"Key `{key.removeprefix('SPEC.')}`"
    where = f"{whole}; in Python `{dotted(config)}`."
    lines = [f"## {place.title}", "", inspect.cleandoc(config.__doc__ or ""), "", where, ""]
    return "\n".join([*lines, *table(config, place.page)]) + "\n"


def section_page(page: Page) -> str:
    """Returns one page below docs/recipes/."""
    mine = [place for place in places().values() if place.page == page]
    anchors = [place.anchor for place in mine]
    if repeated := {anchor for anchor in anchors if anchors.count(anchor) > 1}:
        raise ValueError(
            f"{page.path}: two headings have the anchor {sorted(repeated)[0]!r}; give one a page"
        )
    head = f"# Recipe: {page.title}\n\n{GENERATED} [All sections](../{INDEX}).\n\n"
    head = SPEC_HEAD if page == SPEC else head
    return head + "\n".join(section(place) for place in mine)


def summary(config: type[Config]) -> str:
    """Returns the first sentence of a class's docstring."""
    text = " ".join((config.__doc__ or "").split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text)[0]


def index() -> str:
    """Returns the overview: the recipe's keys, the pages, and every variant by name."""
    pages = ["## Pages", "", "| page | describes |", "|---|---|"]
    for page in PAGES:
        keys = ", ".join(f"`{re.sub(r'^policies[.]', 'policies.*.', key)}`" for key in page.keys)
        pages.append(f"| [{page.title}]({page.path}) | {keys} |")
    pages.append("| [keys that may change](recipes/may_change.md) | at a resume |")
    pages.append(f"| [{SPEC.title}]({SPEC.path}) | the file that `astraflow model init` reads |")
    variants = sorted(
        (p for p in places().values() if p.variant and p.config is not Use), key=lambda p: (p.variant, p.key)
    )
    names = ["## Variants", "", "| name | of | summary |", "|---|---|---|"]
    for place in variants:
        link = f"[`{place.variant}`]({place.link_from(OVERVIEW)})"
        names.append(f"| {link} | `{place.key.rpartition('.')[2]}` | {summary(place.config)} |")
    use = [f"## {places()[Use].title}", "", inspect.cleandoc(Use.__doc__ or ""), "", *table(Use, OVERVIEW)]
    tree = ["```{toctree}", ":hidden:", "", *(f"recipes/{page.name}" for page in (*PAGES, SPEC))]
    tree.append("recipes/may_change")
    whole = f"In Python, a recipe is `{dotted(Recipe)}`, and a component of your own is `{dotted(Use)}`."
    parts = [
        *recipe_table(),
        "",
        whole,
        RULES.rstrip("\n"),
        "",
        *pages,
        "",
        *use,
        "",
        *names,
        "",
        *tree,
        "```",
    ]
    return HEAD + "\n".join(parts) + "\n"


def recipe_table() -> list[str]:
    """Returns the recipe's own keys. A section's type is a link to its page, not the list of its variants."""
    rows: list[str] = []
    links = {page.keys[0]: f"[{page.title}]({page.path})" for page in PAGES}
    for row in table(Recipe, OVERVIEW):
        cells = row.split(" | ")
        key = cells[0].strip("| `")
        rows.append(f"| `{key}` | {links[key]} | {' | '.join(cells[-2:])}" if key in links else row)
    return rows


def pages() -> dict[str, str]:
    """Returns the text of every page by its path below docs/."""
    may_change = MAY_CHANGE_HEAD + "".join(f"- `{key}`\n" for key in MAY_CHANGE)
    return {
        INDEX: index(),
        **{page.path: section_page(page) for page in (*PAGES, SPEC)},
        "recipes/may_change.md": may_change,
    }


def out_of_date(wanted: dict[str, str]) -> list[str]:
    """Returns the pages that are missing, left over, or different."""
    there = {p.relative_to(DOCS).as_posix() for p in [DOCS / INDEX, *(DOCS / "recipes").glob("*.md")]}
    left_over = there - set(wanted)
    return sorted(
        left_over | {path for path, text in wanted.items() if path not in there or read(path) != text}
    )


def read(path: str) -> str:
    """Returns a page as it is on disk."""
    return (DOCS / path).read_text(encoding="utf-8") if (DOCS / path).exists() else ""


def main() -> int:
    """Writes or checks the pages."""
    wanted = pages()
    stale = out_of_date(wanted)
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"not up to date with the config classes: {', '.join(stale)} in docs/; run `make docs`")
        return 1 if stale else 0
    (DOCS / "recipes").mkdir(exist_ok=True)
    for path in stale:
        if path in wanted:
            (DOCS / path).write_text(wanted[path], encoding="utf-8")
        else:
            (DOCS / path).unlink()
    print(f"wrote {len(wanted)} pages of the recipe reference in {DOCS}, {len(stale)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
