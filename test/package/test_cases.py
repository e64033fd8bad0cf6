"""The table of cases names tests that exist."""

import ast
from pathlib import Path
import re

FOLDER = Path(__file__).parents[1]
ROW = re.compile(r'^\| (\d+) \| (.+?) \| (.+) \|$', re.MULTILINE)
NAME = re.compile(r'`(test_\w+\.py)?(?:::)?(test_\w+)?`')


def named_tests(cell):
    """Return (file, function or '') of each test that a cell names; a file goes on counting."""
    file, names = '', []
    for new_file, function in NAME.findall(cell):
        file = new_file or file
        names.append((file, function))
    return names


def functions_of(text):
    """Return the names of the test functions that a file defines, also in its classes."""
    tree = ast.parse(text)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return {node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef)}


def test_every_test_in_the_table_exists():
    rows = ROW.findall((FOLDER / 'CASES.md').read_text())
    assert len(rows) > 50
    for number, _, cell in rows:
        names = named_tests(cell)
        assert names or cell.startswith(('does not apply', 'not built')), number
        for file, function in names:
            found = list(FOLDER.rglob(file))
            assert len(found) == 1, (number, file)
            if function:
                assert function in functions_of(found[0].read_text()), (number, file, function)


def test_the_cases_are_in_order_and_each_is_there_once():
    numbers = [int(number) for number, _, _ in ROW.findall((FOLDER / 'CASES.md').read_text())]
    assert numbers == sorted(set(numbers))


def test_a_name_that_only_begins_alike_is_not_there():
    text = 'def test_ab():\n    def test_a():\n        pass\n\n\n# def test_b():\n'
    assert functions_of(text + 'class TestX:\n    def test_c(self):\n        pass\n') == {
        'test_ab',
        'test_c',
    }
