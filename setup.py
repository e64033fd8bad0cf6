from glob import glob

from setuptools import find_packages, setup

PACKAGE = 'lingbot_map_ros'

setup(
    name=PACKAGE,
    version='0.1.0',
    description='Streaming 3D reconstruction from one camera: poses, point clouds and TF.',
    maintainer='lingbot_map_ros maintainers',
    maintainer_email='maintainers@lingbot-map-ros.invalid',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=find_packages(
        include=['lingbot_map', 'lingbot_map.*', 'lingbot_map_ros', 'lingbot_map_ros.*']
    ),
    package_data={'lingbot_map': ['data/*', 'data/*/*']},
    data_files=[
        ('share/ament_index/resource_index/packages', [f'resource/{PACKAGE}']),
        (f'share/{PACKAGE}', ['package.xml']),
        (f'share/{PACKAGE}/launch', sorted(glob('launch/*.launch.py'))),
        (f'share/{PACKAGE}/config', sorted(glob('config/*'))),
    ],
    # A distribution provides the rest through package.xml, a bare machine through requirements/.
    install_requires=['setuptools'],
    extras_require={
        'torch': ['torch>=2.11', 'numpy', 'pillow', 'safetensors'],
        'replay': ['matplotlib', 'opencv-python-headless<5', 'PyYAML', 'tqdm'],
        'bags': ['rosbags'],
        'hub': ['huggingface_hub'],
        'eval': ['evo'],
        'rerun': ['rerun-sdk>=0.23'],
        'flashinfer': ['flashinfer-python==0.6.0'],  # compiles its kernels with nvcc at first use
        # colcon runs pytest only when it finds it here.
        'test': ['pytest<9', 'plyfile'],
    },
    zip_safe=False,
    entry_points={
        'console_scripts': [
            'lingbot_map_evaluate = lingbot_map.evaluation.cli:main',
            'lingbot_map_node = lingbot_map_ros.main:main',
            'lingbot_map_replay = lingbot_map_ros.replay.cli:main',
        ],
    },
)
