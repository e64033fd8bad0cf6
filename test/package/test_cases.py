"""The table of cases names tests that exist."""

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


def test_every_test_in_the_table_exists():
    rows = ROW.findall((FOLDER / 'CASES.md').read_text())
    assert len(rows) > 50
    for number, _, cell in rows:
        names = named_tests(cell)
        assert names or cell.startswith(('does not apply', 'not built')), number
        for file, function in names:
            found = list(FOLDER.rglob(file))
            assert len(found) == 1, (number, file)
            assert f'def {function}' in found[0].read_text(), (number, file, function)


def test_the_cases_are_in_order_and_each_is_there_once():
    numbers = [int(number) for number, _, _ in ROW.findall((FOLDER / 'CASES.md').read_text())]
    assert numbers == sorted(set(numbers))
