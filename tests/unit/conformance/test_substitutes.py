"""The substitutes among the examples are short, and know nothing of AstraFlow."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

EXAMPLES = Path(__file__).parents[3] / "examples"
NODE = shutil.which("node")
SIZES = (241, 1000, 1024, 1025, 1088, 2048, 2049, 5000)


@pytest.mark.parametrize(
    "name", ["plain_trainer.py", *(p.name for p in (EXAMPLES / "node-rollout").glob("*.mjs"))]
)
def test_a_substitute_has_fewer_than_150_lines(name: str) -> None:
    (path,) = EXAMPLES.rglob(name)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 150


def test_the_trainer_imports_nothing_of_astraflow() -> None:
    lines = (EXAMPLES / "plain_trainer.py").read_text(encoding="utf-8").splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if re.match(r"(import|from) ", line)}
    foreign = {name for name in imports if name not in sys.stdlib_module_names}
    assert foreign == {"requests", "torch", "transformers", "xxhash"}


def test_the_rollout_service_imports_only_itself_and_what_comes_with_node() -> None:
    for path in (EXAMPLES / "node-rollout").glob("*.mjs"):
        for source in re.findall(r'^import .* from "(.*)";', path.read_text(encoding="utf-8"), re.MULTILINE):
            assert source.startswith(("./", "node:")), f"{path.name} imports {source}"


@pytest.mark.skipif(NODE is None, reason="node is not installed here")
def test_its_hashes_are_those_of_xxh3() -> None:
    script = (
        f'import {{ xxh3 }} from "{EXAMPLES}/node-rollout/xxh3.mjs";'
        f"const sizes = {list(SIZES)};"
        "const bytes = (n) => Buffer.from(Array.from({ length: n }, (_, i) => (i * 7) % 251));"
        "console.log(JSON.stringify(sizes.map((n) => xxh3(bytes(n)))));"
    )
    argv = [str(NODE), "--input-type=module", "-e", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    expected = [xxhash.xxh3_128_hexdigest(bytes(i * 7 % 251 for i in range(size))) for size in SIZES]
    assert json.loads(done.stdout) == expected
