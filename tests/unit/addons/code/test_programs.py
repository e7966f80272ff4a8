"""Which text of a reply is its program."""

import pytest

from astraflow.addons.code.programs import program_of

OK = "n = int(input())\nprint(n * 2)"
BAD = "n = int(input())\nprint(n)"
STRING = f"HELP = '''\n```\n3 -> 6\n```\n'''\n{OK}"


@pytest.mark.parametrize(
    "reply",
    [
        OK,
        f"```python\n{OK}\n```",
        f"```\n{OK}\n```",
        f"~~~python\n{OK}\n~~~\n",
        f"~~~\n{OK}\n~~~\n",
        f"````python\n{OK}\n````\n",
        f"```python3\n{OK}\n```",
        f"```Python\n{OK}\n```",
        f"```py\n{OK}\n```",
        f"``` python\n{OK}\n```",
        f"```python title='a.py'\n{OK}\n```",
        f"```{{.python}}\n{OK}\n```",
        f"```main.py\n{OK}\n```\n```\n6\n```",
        f"```python3.11\n{OK}\n```",
        f"```python\n{OK}\n```\nThe last line doubles it:\n```python\nprint(n * 2)\n```\n",
        "First:\n```python\nn = int(input())\n```\nThen:\n```python\nprint(n * 2)\n```\n",
        "```python\ndef f(n):\n    return n * 2\n```\n```python\nprint(f(int(input())))\n```\n```\n6\n```\n",
        f"1. So:\n   ```python\n   {OK.replace(chr(10), chr(10) + '   ')}\n   ```\n",
        f"- ```python\n  {OK.replace(chr(10), chr(10) + '  ')}\n  ```\n",
        f"```python\n    {OK.replace(chr(10), chr(10) + '    ')}\n```\n",
        f"Draft:\n```python\n{BAD}\n```\nBetter:\n```python\n{OK}\n```\n",
        f"Draft:\n```python\n{BAD}\n```\nBetter:\n```\n{OK}\n```\n",
        # example outputs, commands and other text after the program
        f"```python\n{OK}\n```\nFor 3 it prints:\n```\n6\n```\n",
        f"```python\n{OK}\n```\nFor 3 it prints:\n```python\n6\n```\n",
        f"```python\n{OK}\n```\nIt prints:\n```\nx = 6\n```\n",
        f"```python\n{OK}\n```\nRun it:\n```bash\npython3 main.py < in.txt\n```\n",
        f"```python\n{OK}\n```\n```text\n6\n```\n```json\n{{}}\n```\n",
        f"```\n{OK}\n```\nOutput:\n```\n6\n```\n",
        f"```python\n{OK}\n```\n~~~\n6\n~~~\n",
        f"```python\n{OK}\n```\n```python\n>>> double(3)\n6\n```\n",
        f"```python\n{OK}\n```\n```pycon\n>>> 3 * 2\n6\n```\n",
        f"{OK}\n\nIt prints:\n```\n6\n```\n",
        # fences that were not closed or not opened
        f"Here it is:\n```python\n{OK}\n",
        f"Here it is:\n~~~python\n{OK}",
        f"Draft:\n```python\n{BAD}\n```\nBetter:\n```python\n{OK}\n",
        f"Draft:\n```python\n{BAD}\nWait, better:\n```python\n{OK}\n```\n",
        f"{OK}\n```\n",
        f"{OK}\n```\nIt doubles the number.",
        f"{OK}\n```\nFor 3 it prints:\n```\n6\n```\n",
        f"{OK}```",
        f"{BAD}\n```\nBetter:\n```python\n{OK}\n```\n",
        f"```python\n{OK}```\n",
        f"```python\n{OK}\n```.\n",
        f"```python\n{OK}\n``` This doubles the number.\n",
        f"Here it is: ```python\n{OK}\n```\n",
        # fences in strings
        f"```python\n{STRING}\n```\n",
        f"```python\n{STRING}\n",
        f"````python\n{STRING}\n````\n",
        f"```python\n{STRING.replace('```', '~~~')}\n```\n",
        f"~~~python\n{STRING.replace('```', '~~~')}\n~~~\n",
        f"```python\nHELP = '''\n```python\n3 -> 6\n```\n'''\n{OK}\n```\nIt prints:\n```\n6\n```\n",
        STRING,
        f"```python\n{OK}\nprint('```', end='')\n```\n",
        f"````markdown\n# Answer\n```python\n{OK}\n```\n````\n",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_program_is_the_last_block_of_python(reply: str, newline: str) -> None:
    program = program_of(reply.replace("\n", newline))
    code = compile(program, "main.py", "exec")
    printed: list[str] = []
    exec(code, {"input": lambda: "3", "print": lambda value, end="": printed.append(str(value))})
    assert [value for value in printed if value != "```"] == ["6"]


def test_an_example_of_use_is_not_the_program() -> None:
    solution = "def double(n):\n    return 2 * n\n\nprint(double(int(input())))"
    for use in ("print(double(3))", "assert double(3) == 6", "for i in range(3):\n    print(i, double(i))"):
        assert program_of(f"```python\n{solution}\n```\nTry:\n```python\n{use}\n```\n") == f"{solution}\n"
    # A later version that defines the function again is not an example.
    again = f"{solution}\n# better"
    assert program_of(f"```python\n{solution}\n```\n```python\n{again}\n```\n") == f"{again}\n"


def test_a_block_that_defines_the_function_of_the_task_comes_first() -> None:
    solution = "from typing import List\ndef total(a: List[int]):\n    return sum(a)\n"
    shorter = "class Solution:\n    def total(self, a: List[int]):\n        return sum(a)\n"
    use = "import json\nprint(json.dumps([1]))"
    reply = f"```python\n{solution}```\n```python\n{shorter}```\n```python\n{use}\n```\n"
    assert program_of(reply, "total") == shorter
    assert program_of(f"```python\ntotal = lambda a: sum(a)\n```\n```\n{use}\n```", "total") == (
        "total = lambda a: sum(a)\n"
    )


def test_without_a_whole_program_the_last_block_of_python_counts() -> None:
    assert program_of("```python\nif x\n```\n```python\nif y\n```\n```bash\nls\n```\n") == "if y\n"
    assert program_of("```cpp\nint x;\n```\n") == "int x;\n"
    assert program_of("```solution\nprint(1)\n```\nIt prints:\n```cpp\nint x;\n```\n") == "print(1)\n"
    assert program_of("It is ```x```.") == "It is ```x```."
    assert program_of("I don't know.") == "I don't know."
    assert program_of("```python\n```\n") == "```python\n```\n"
    assert program_of("") == ""


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "reply",
    [
        "```\n'''\n" * 20_000,
        "`" * 200_000,
        "```" + " " * 100_000 + "`",
        "```python\n" + "(" * 100_000,
        "```python\n" + "x = 1\n```\n'''\n" * 20_000,
        "```python\nx = '\ud800\x00'\n```\n",
        "~" * 200_000 + "\n" + "```python\n" * 20_000,
    ],
)
def test_a_hostile_reply_takes_little_time(reply: str) -> None:
    assert isinstance(program_of(reply), str)


@pytest.mark.parametrize(("num_chars", "is_judged"), [(10, True), (600_000, False)])
def test_the_texts_that_are_parsed_have_a_total_length(num_chars: int, is_judged: bool) -> None:
    program = f"pad = '{'x' * num_chars}'\n{OK}"
    reply = f"```python\n{program}\n```\nIt prints:\n```python\n6\n```\n"
    assert program_of(reply) == (f"{program}\n" if is_judged else "6\n")
