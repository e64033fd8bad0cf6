import re

import cv2
import numpy as np
from sensor_msgs.msg import Image

# Encoding: (name in OpenCV's conversion codes, type of a value, channels).
_COLORS = {
    'mono8': ('GRAY', 'uint8', 1),
    'rgb8': ('RGB', 'uint8', 3),
    'bgr8': ('BGR', 'uint8', 3),
    'rgba8': ('RGBA', 'uint8', 4),
    'bgra8': ('BGRA', 'uint8', 4),
    'mono16': ('GRAY', 'uint16', 1),
    'rgb16': ('RGB', 'uint16', 3),
    'bgr16': ('BGR', 'uint16', 3),
    'rgba16': ('RGBA', 'uint16', 4),
    'bgra16': ('BGRA', 'uint16', 4),
}
_DEPTHS = {
    '8U': 'uint8',
    '8S': 'int8',
    '16U': 'uint16',
    '16S': 'int16',
    '32S': 'int32',
    '32F': 'float32',
    '64F': 'float64',
}
_DEPTH_NAMES = {dtype: depth for depth, dtype in _DEPTHS.items()}
_PLAIN = re.compile(r'(8U|8S|16U|16S|32S|32F|64F)(?:C([0-9]+))?')


class CvBridgeError(TypeError):
    """An image cannot be converted."""


class CvBridge:
    def encoding_to_dtype_with_channels(self, encoding):
        """Return the numpy type name of one value and the number of channels."""
        if encoding in _COLORS:
            return _COLORS[encoding][1:]
        match = _PLAIN.fullmatch(encoding)
        if not match:
            raise CvBridgeError(f'Unrecognized image encoding [{encoding}]')
        return _DEPTHS[match[1]], int(match[2] or 1)

    def imgmsg_to_cv2(self, img_msg, desired_encoding='passthrough'):
        """
        Return the pixels (H, W) or (H, W, C) in `desired_encoding`, row padding removed.

        Raises CvBridgeError for an unknown encoding or conversion, or too little data.
        """
        name, channels = self.encoding_to_dtype_with_channels(img_msg.encoding)
        dtype = np.dtype(name).newbyteorder('>' if img_msg.is_bigendian else '<')
        shape = (img_msg.height, img_msg.width, channels)[: 2 if channels == 1 else 3]
        strides = (img_msg.step, dtype.itemsize * channels, dtype.itemsize)[: len(shape)]
        try:
            pixels = np.ndarray(shape, dtype, buffer=img_msg.data, strides=strides)
        except (TypeError, ValueError) as error:
            raise CvBridgeError(f'Image is wrongly formed: {error}') from error
        return _convert(pixels.astype(name), img_msg.encoding, desired_encoding)

    def compressed_imgmsg_to_cv2(self, cmprs_img_msg, desired_encoding='passthrough'):
        """
        Return the decoded pixels: as stored for `passthrough`, else converted from bgr8.

        Raises CvBridgeError if the data is not an image or the conversion is unknown.
        """
        data = np.frombuffer(cmprs_img_msg.data, np.uint8)
        try:
            pixels = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        except cv2.error as error:
            raise CvBridgeError(str(error)) from error
        if pixels is None and desired_encoding != 'passthrough':
            raise CvBridgeError(f'cannot decode the {cmprs_img_msg.format!r} image')
        return _convert(pixels, 'bgr8', desired_encoding)

    def cv2_to_imgmsg(self, cvim, encoding='passthrough', header=None):
        """
        Return an Image message of the pixels (H, W) or (H, W, C).

        `passthrough` uses the type of the array, such as 32FC1. Raises CvBridgeError if
        `encoding` has another type or number of channels than the array.
        """
        if not isinstance(cvim, np.ndarray):
            raise TypeError('Your input type is not a numpy array')
        channels = 1 if cvim.ndim < 3 else cvim.shape[2]
        array_type = f'{_DEPTH_NAMES[cvim.dtype.name]}C{channels}'
        message = Image(height=cvim.shape[0], width=cvim.shape[1])
        message.encoding = array_type if encoding == 'passthrough' else encoding
        expected = self.encoding_to_dtype_with_channels(message.encoding)
        if expected != (cvim.dtype.name, channels):
            raise CvBridgeError(
                f'encoding specified as {encoding}, but image has incompatible type {array_type}'
            )
        if header is not None:
            message.header = header
        message.is_bigendian = cvim.dtype.byteorder == '>'
        message.data.frombytes(cvim.tobytes())
        message.step = len(message.data) // message.height
        return message


def _convert(pixels, source, target):
    """Convert `pixels` from encoding `source` to `target`, scaling between 8 and 16 bits."""
    if target in ('passthrough', source):
        return pixels
    if source not in _COLORS or target not in _COLORS:
        raise CvBridgeError(f'Unsupported conversion from [{source}] to [{target}]')
    source_color, source_type, _ = _COLORS[source]
    target_color, target_type, _ = _COLORS[target]
    if source_color != target_color:
        try:
            pixels = cv2.cvtColor(pixels, getattr(cv2, f'COLOR_{source_color}2{target_color}'))
        except cv2.error as error:
            raise CvBridgeError(str(error)) from error
    if source_type != target_type:
        factor = 65535.0 / 255.0 if target_type == 'uint16' else 255.0 / 65535.0
        pixels = np.rint(pixels * factor).astype(target_type)
    return pixels
