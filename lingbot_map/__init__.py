"""Streaming reconstruction from one camera, without ROS."""

import os

# Let idle OpenMP threads of torch sleep instead of spin: beside one busy process on two cores,
# spinning threads wait for each other and make the network ten times slower or worse. OpenMP reads
# this once, when torch is imported, so it is set here, before any module of this package can
# import torch. A program that imports torch first has to set it itself.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
