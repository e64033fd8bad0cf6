"""
The part of sensor_msgs_py.point_cloud2 that this project uses, for systems without ROS.

Signatures are those of the original. Only unorganized clouds are supported.
"""

from array import array
from collections.abc import Iterable
import sys

import numpy as np
from numpy.lib.recfunctions import unstructured_to_structured
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

_TYPES = {
    PointField.INT8: np.int8,
    PointField.UINT8: np.uint8,
    PointField.INT16: np.int16,
    PointField.UINT16: np.uint16,
    PointField.INT32: np.int32,
    PointField.UINT32: np.uint32,
    PointField.FLOAT32: np.float32,
    PointField.FLOAT64: np.float64,
}


def dtype_from_fields(fields: Iterable[PointField], point_step: int | None = None) -> np.dtype:
    """Return the structured type of one point; fields with a count above 1 are not supported."""
    fields = list(fields)
    assert all(field.count == 1 for field in fields), 'a field has a count other than 1'
    layout = {
        'names': [field.name for field in fields],
        'formats': [_TYPES[field.datatype] for field in fields],
        'offsets': [field.offset for field in fields],
    }
    if point_step is not None:
        layout['itemsize'] = point_step
    return np.dtype(layout)


def create_cloud(
    header: Header,
    fields: Iterable[PointField],
    points: Iterable,
    point_step: int | None = None,
) -> PointCloud2:
    """
    Return a cloud of `points`: a structured array (N,), an array (N, F) or tuples.

    As in the original, N must be at least 1 and a structured array must have the type of `fields`.
    """
    dtype = dtype_from_fields(fields, point_step)
    if not isinstance(points, np.ndarray):
        points = np.array([tuple(point) for point in points], dtype)
    elif points.dtype.names is None:
        points = unstructured_to_structured(points, dtype)
    assert points.dtype == dtype, f'points have type {points.dtype}, fields have {dtype}'
    assert points.ndim == 1, f'an unorganized cloud has one dimension, not {points.ndim}'
    cloud = PointCloud2(
        header=header,
        height=1,
        width=len(points),
        fields=fields,
        is_bigendian=sys.byteorder == 'big',
        point_step=dtype.itemsize,
        row_step=dtype.itemsize * len(points),
    )
    # Set after construction: the constructor checks each byte.
    data = array('B')
    data.frombytes(memoryview(points).cast('B'))
    cloud.data = data
    return cloud


def create_cloud_xyz32(header: Header, points: Iterable) -> PointCloud2:
    """Return a cloud of float32 x, y, z."""
    fields = [
        PointField(name=name, offset=4 * i, datatype=PointField.FLOAT32, count=1)
        for i, name in enumerate('xyz')
    ]
    return create_cloud(header, fields, points)


def read_points(
    cloud: PointCloud2,
    field_names: list[str] | None = None,
    skip_nans: bool = False,
    uvs: Iterable | None = None,
    reshape_organized_cloud: bool = False,
) -> np.ndarray:
    """Return the points as a structured array (N,) that shares memory with the message."""
    assert not cloud.is_bigendian, 'big-endian clouds are not supported'
    assert not (reshape_organized_cloud and cloud.height > 1), 'organized clouds are not supported'
    dtype = dtype_from_fields(cloud.fields, cloud.point_step)
    points = np.ndarray((cloud.width * cloud.height,), dtype, buffer=cloud.data)
    if field_names is not None:
        points = points[list(field_names)]
    if skip_nans and not cloud.is_dense:
        points = points[~np.any([np.isnan(points[name]) for name in points.dtype.names], axis=0)]
    if uvs is not None:
        points = points[uvs if isinstance(uvs, np.ndarray) else np.fromiter(uvs, int)]
    return points
