"""Streaming reconstruction from one camera, without ROS."""

import os

# Let idle OpenMP threads of torch spin for a short time only, then sleep. By default they spin for
# so long that beside one busy process on two cores the network is ten times slower or worse;
# without any spinning it is a third slower on idle cores. OpenMP reads this once, when torch is
# imported, so it is set here, before any module of this package can import torch. A program that
# imports torch first has to set it itself.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')
