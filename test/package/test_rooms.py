"""Who may import whom: rooms in their order, and no circle among files."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A room may import the rooms of the lines above its own. Also imports inside functions count.
LIBRARY = """
config errors
geometry cli settings
layers
aggregator heads
models
streaming
images mapping
places
recordings
evaluation
memory_budget train benchmark
"""
NODE = """
frame parameters rclpy_fixes
input
output
mapping
services diagnostics
node
main replay live_benchmark
"""
# What is not in the order: rooms with the only rooms that they may import.
EXCEPTIONS = {
    'lingbot_map.synthetic': {'lingbot_map.geometry', 'lingbot_map.cli', 'lingbot_map.errors'},
    'lingbot_map_ros.launching': {'lingbot_map.settings', 'lingbot_map_ros.parameters'},
}
USERS_OF_SYNTHETIC = {'lingbot_map.train', 'lingbot_map.benchmark'}


def modules():
    """Return the path of each module by its dotted name."""
    paths = (p for top in ('lingbot_map', 'lingbot_map_ros') for p in (ROOT / top).rglob('*.py'))
    return {'.'.join(p.relative_to(ROOT).with_suffix('').parts): p for p in paths}


def imports(path, known):
    """Return the modules of ours that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known.keys()


def room(module):
    return '.'.join(module.split('.')[:2])


def ranks():
    """Return the place of each room in the order; all of the node come after the library."""
    lines = [f'lingbot_map.{line}' for line in LIBRARY.strip().split('\n')]
    lines = [line.replace(' ', ' lingbot_map.') for line in lines]
    node = [f'lingbot_map_ros.{line}' for line in NODE.strip().split('\n')]
    lines += [line.replace(' ', ' lingbot_map_ros.') for line in node]
    return {name: rank for rank, line in enumerate(lines) for name in line.split()}


def forbidden(graph):
    """Return 'a imports b' for each import that goes against the order."""
    rank, wrong = ranks(), []
    for module, imported in graph.items():
        for other in imported:
            here, there = room(module), room(other)
            if here == there:
                continue
            if here in EXCEPTIONS:
                allowed = there in EXCEPTIONS[here]
            elif there == 'lingbot_map.synthetic':
                allowed = here in USERS_OF_SYNTHETIC
            else:
                allowed = rank.get(there, len(rank)) < rank.get(here, 0)
            if not allowed:
                wrong.append(f'{module} imports {other}')
    return wrong


def the_graph():
    known = modules()
    return {name: imports(path, known) for name, path in known.items() if path.stem != '__init__'}


def test_no_file_imports_a_room_above_its_own():
    graph = the_graph()
    assert {room(name) for name in graph} <= ranks().keys() | EXCEPTIONS.keys()
    assert forbidden(graph) == []


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter(the_graph()).prepare()  # CycleError names the circle


@pytest.mark.parametrize(
    ('module', 'other'),
    [
        ('lingbot_map.models.memory', 'lingbot_map.streaming.engine'),
        ('lingbot_map.evaluation.run', 'lingbot_map_ros.frame'),
        ('lingbot_map_ros.input.inbox', 'lingbot_map_ros.output.frames'),
        ('lingbot_map_ros.launching', 'lingbot_map_ros.node'),
        ('lingbot_map.synthetic.rooms', 'lingbot_map.models.memory'),
        ('lingbot_map.evaluation.run', 'lingbot_map.synthetic.rooms'),
    ],
)
def test_a_forbidden_import_is_found(module, other):
    graph = the_graph()
    assert {module, other} <= graph.keys()
    graph[module] = graph[module] | {other}
    assert f'{module} imports {other}' in forbidden(graph)


def test_the_tests_of_the_library_do_not_use_the_node():
    users = [
        path.name
        for path in (ROOT / 'test' / 'library').rglob('*.py')
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module.split('.')[0] in ('lingbot_map_ros', 'rclpy')
    ]
    assert users == []
