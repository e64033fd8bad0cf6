"""A calibrated camera of 56x42 pixels with distortion, as camera_info, and one image of it."""

from image_messages import encode
from lingbot_map.images.camera import camera_of
from lingbot_map.images.view import View
import numpy as np
from sensor_msgs.msg import CameraInfo

W, H = 56, 42
K = np.array([[50.0, 0, 27.0], [0, 51.0, 22.0], [0, 0, 1]])
P = np.array([[44.0, 0, 28.5, 0], [0, 45.0, 20.5, 0], [0, 0, 1, 0]])
NEXT_MAP = 'the next map will use it'


def info(d=(-0.3, 0.1, 0.0, 0.0, 0.0), k=K, size=(W, H), frame_id='cam'):
    message = CameraInfo(width=size[0], height=size[1], distortion_model='plumb_bob', d=list(d))
    message.header.frame_id = frame_id
    message.k, message.r, message.p = k.ravel(), np.eye(3).ravel(), P.ravel()
    return message


def raw_pixels():
    return np.random.default_rng(0).integers(0, 256, (H, W, 3), np.uint8)


def rectified():
    return View((W, H), camera_of(info(), False)).prepare(raw_pixels())


def picture():
    return encode('rgb8', raw_pixels())
