"""Checks the package as ROS tools and people without ROS meet it: built, installed, described."""

import ast
import json
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from catkin_pkg.package import parse_package
import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
# golden stays: the pytest plugin of launch_testing imports every file of tests.
NOT_COPIED = ('.*', 'build', 'install', 'log', 'results', '*.egg-info', '__pycache__')
# Import names that package.xml calls otherwise, and those that it leaves to pip.
KEYS = {
    'PIL': 'python3-pil',
    'catkin_pkg': 'python3-catkin-pkg-modules',
    'cv2': 'python3-opencv',
    'matplotlib': 'python3-matplotlib',
    'numpy': 'python3-numpy',
    'pytest': 'python3-pytest',
    'setuptools': 'python3-setuptools',
    'tf2_ros': 'tf2_ros_py',
    'tqdm': 'python3-tqdm',
    'yaml': 'python3-yaml',
}
BY_PIP = {'plyfile', 'rosbags', 'safetensors', 'torch'}
WITH_TORCH = {'triton'}
# What works without these says so when they are missing; import name -> (extra, name for pip).
OPTIONAL = {
    'flashinfer': ('flashinfer', 'flashinfer-python'),
    'huggingface_hub': ('hub', 'huggingface_hub'),
    'rerun': ('rerun', 'rerun-sdk'),
}


def run(command, cwd=ROOT, **environment):
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope='module')
def workspace(tmp_path_factory):
    """Build a copy of the package with colcon; return the folder of the workspace."""
    folder = tmp_path_factory.mktemp('workspace')
    source = folder / 'src' / 'lingbot_map_ros'
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    prefixes = os.environ['AMENT_PREFIX_PATH']
    built = run([sys.executable, '-m', 'colcon', 'build'], folder, CMAKE_PREFIX_PATH=prefixes)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def run_sourced(workspace, command):
    """Run `command` as one does after sourcing the set-up file of the workspace."""
    line = f'. install/local_setup.sh && exec {shlex.join(command)}'
    return run(['sh', '-c', line], workspace)


def test_manifest_and_setup_agree():
    manifest = parse_package(str(ROOT / 'package.xml'))
    told = run([sys.executable, 'setup.py', '--name', '--version', '--license'])
    assert told.stdout.split() == [manifest.name, manifest.version, manifest.licenses[0]]
    assert manifest.package_format == 3
    assert manifest.get_build_type() == 'ament_python'


def imported_by(node):
    """Return the top-level names that a node of a syntax tree imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split('.')[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {node.module.split('.')[0]}
    return set()


def imported(*folders):
    """Return what package.xml calls the modules that the files below `folders` import."""
    names = set()
    paths = [path for folder in folders for path in (ROOT / folder).rglob('*.py')]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names |= imported_by(node)
    own = {
        'lingbot_map',
        'lingbot_map_ros',
        *(path.stem for path in (ROOT / 'test').rglob('*.py')),
    }
    others = own | BY_PIP | WITH_TORCH | OPTIONAL.keys() | set(sys.stdlib_module_names)
    return {KEYS.get(name, name) for name in names - others}


def test_manifest_names_every_import_and_no_more():
    manifest = parse_package(str(ROOT / 'package.xml'))
    to_run = {dependency.name for dependency in manifest.exec_depends}
    to_test = {dependency.name for dependency in manifest.test_depends}
    assert to_run == imported('lingbot_map', 'lingbot_map_ros', 'launch')
    assert to_test == imported('test') - to_run


def extras():
    """Return the requirements of setup.py by the name of their extra."""
    code = (
        'import json, setuptools\n'
        'setuptools.setup = lambda **fields: print(json.dumps(fields["extras_require"]))\n'
        'import setup'
    )
    told = run([sys.executable, '-c', code])
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_what_pip_has_to_bring_is_named():
    named = {re.match(r'[\w-]+', each)[0] for extra in extras().values() for each in extra}
    assert named >= BY_PIP


@pytest.mark.parametrize('name', OPTIONAL)
def test_an_optional_import_is_an_extra_and_made_only_on_use(name):
    extra, package = OPTIONAL[name]
    assert extras()[extra][0].startswith(package)
    users = []
    for path in (*ROOT.glob('lingbot_map/**/*.py'), *ROOT.glob('lingbot_map_ros/**/*.py')):
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if name in imported_by(node)]
        assert not any(node in tree.body for node in imports), path
        users += imports
    assert users


def test_every_folder_with_sources_is_packaged():
    folders = {
        path.parent.relative_to(ROOT)
        for top in ('lingbot_map', 'lingbot_map_ros')
        for path in (ROOT / top).rglob('*.py')
    }
    packages = find_packages(str(ROOT), include=['lingbot_map*', 'lingbot_map_ros*'])
    assert {'.'.join(folder.parts) for folder in folders} == set(packages)


def test_build_installs_what_ros_looks_for(workspace):
    code = (
        'from pathlib import Path; import lingbot_map, ament_index_python as index;'
        'print(index.get_package_share_directory("lingbot_map_ros"));'
        'print(len(list(Path(lingbot_map.__file__).parent.glob("data/walk/*.jpg"))));'
        'print(lingbot_map.__file__)'
    )
    told = run_sourced(workspace, [sys.executable, '-c', code])
    assert told.returncode == 0, told.stderr
    share, photographs, module = told.stdout.split()
    install = workspace / 'install' / 'lingbot_map_ros'
    assert Path(share) == install / 'share' / 'lingbot_map_ros'
    assert install in Path(module).parents
    assert photographs == '16'
    shared = [
        ROOT / 'package.xml',
        *(ROOT / 'launch').glob('*.py'),
        *(ROOT / 'config').glob('*.*'),
    ]
    for path in shared:
        assert Path(share, path.relative_to(ROOT)).read_text() == path.read_text()


def test_build_installs_the_programs(workspace):
    programs = workspace / 'install' / 'lingbot_map_ros' / 'lib' / 'lingbot_map_ros'
    helped = run_sourced(workspace, [str(programs / 'lingbot_map_replay'), '--help'])
    assert helped.returncode == 0, helped.stderr
    assert '--image-topic' in helped.stdout
    helped = run_sourced(workspace, [str(programs / 'lingbot_map_evaluate'), '--help'])
    assert helped.returncode == 0, helped.stderr
    assert '--ground-truth' in helped.stdout
    node = [str(programs / 'lingbot_map_node'), '--ros-args', '-p', 'checkpoint:=/no/weights.pt']
    refused = run_sourced(workspace, node)
    assert refused.returncode == 1
    assert "'/no/weights.pt'" in refused.stderr
    assert 'Traceback' not in refused.stderr


def test_ros2_launch_can_read_the_parameters_without_torch():
    code = (
        'import sys; sys.modules["torch"] = None; '
        'import lingbot_map.settings, lingbot_map_ros.parameters'
    )
    told = run([sys.executable, '-c', code])
    assert told.returncode == 0, told.stderr


@pytest.mark.skipif(not shutil.which('ros2'), reason='no ros2: a distribution has it')
def test_launch_file_starts_the_node_with_its_arguments(workspace):
    arguments = ['namespace:=robot1', 'checkpoint:=/no/weights.pt', 'respawn:=false']
    command = ['ros2', 'launch', 'lingbot_map_ros', 'lingbot_map.launch.py', *arguments]
    launched = run_sourced(workspace, command)
    told = launched.stdout + launched.stderr
    assert "[robot1.lingbot_map]: configure failed: checkpoint '/no/weights.pt'" in told


def test_colcon_test_runs_pytest(workspace):
    # One test of this file: all of them would build a workspace in the workspace.
    only = ['--pytest-args', 'test/package/test_package.py', '-k', 'manifest_and_setup_agree']
    tested = run([sys.executable, '-m', 'colcon', 'test', *only], workspace)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    results = ElementTree.parse(workspace / 'build' / 'lingbot_map_ros' / 'pytest.xml')
    names = [case.get('name') for case in results.iter('testcase')]
    assert names == ['test_manifest_and_setup_agree']
    assert not list(results.iter('failure'))


@pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')
def test_make_sends_users_of_a_distribution_to_colcon():
    refused = run(['make', '--no-print-directory', 'setup'], ROS_DISTRO='jazzy')
    assert refused.returncode != 0
    assert 'colcon build' in refused.stderr


@pytest.mark.parametrize(
    ('python', 'path', 'named'),
    [
        ('no-such-python', os.environ['PATH'], "'no-such-python' not found"),
        (sys.executable, '/nowhere', "'cmake' not found"),
    ],
)
def test_setup_names_what_is_missing(python, path, named):
    shell = shutil.which('sh')
    refused = run([shell, 'requirements/check_machine.sh', python], PATH=path)
    assert refused.returncode == 1
    assert named in refused.stderr
    assert refused.stderr.count('\n') == 1


def test_profile_for_large_messages_is_loaded(tmp_path):
    # Fast DDS complains on stdout about a profile that it cannot read.
    code = 'import rclpy; rclpy.init(); rclpy.create_node("profiled")'
    profile = ROOT / 'config' / 'fastdds_large_messages.xml'
    loaded = run([sys.executable, '-c', code], FASTRTPS_DEFAULT_PROFILES_FILE=str(profile))
    assert (loaded.returncode, loaded.stdout) == (0, '')
    broken = tmp_path / 'broken.xml'
    broken.write_text(profile.read_text().replace('segment_size', 'segment_sise'))
    complained = run([sys.executable, '-c', code], FASTRTPS_DEFAULT_PROFILES_FILE=str(broken))
    assert 'segment_sise' in complained.stdout
