"""The fenced blocks in a reply."""

import pytest

from astraflow.addons.envs.harbor import commands_of
from astraflow.addons.sandbox.fences import FencedBlock, fenced_blocks


def test_a_block_has_the_language_of_its_fence_and_the_text_without_its_indentation() -> None:
    reply = "1. List:\n\n   ```Bash\n   ls\n     pwd\n   ```\n\n~~~\n```\n~~~\n"
    assert fenced_blocks(reply) == [FencedBlock("bash", "ls\n  pwd\n", 2), FencedBlock("", "```\n", 7)]


@pytest.mark.parametrize(
    ("reply", "commands"),
    [
        ("I look.\n```bash\nls\n```", "ls\n"),
        ("```\nls\n```\n```\npwd\n```", "ls\n\npwd\n"),
        ("~~~sh\nls\n~~~", "ls\n"),
        ("```bash\nls", "ls\n"),
        ("```bash\nls\n```\nIt prints:\n```\na.txt\n```\n", "ls\n"),
        ("```sh\nls\n```\n```text\na.txt\n```\n", "ls\n"),
        ("```\nls\n```\n```text\na.txt\n```\n", "ls\n"),
        ("````bash\ncat > a.md <<'EOF'\n```\nx\n```\nEOF\n````\n", "cat > a.md <<'EOF'\n```\nx\n```\nEOF\n"),
        ("I am done.", ""),
        ("I am done: it was `ls`.\n```\n", ""),
    ],
)
def test_the_commands_of_a_reply_are_its_blocks_of_shell(reply: str, commands: str) -> None:
    assert commands_of(reply) == commands
