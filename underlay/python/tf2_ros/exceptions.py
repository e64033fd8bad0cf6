class TransformException(Exception):
    """Base class: the transform is not available."""


class ConnectivityException(TransformException):
    """The frames are not part of one tree."""


class LookupException(TransformException):
    """A frame does not exist."""


class ExtrapolationException(TransformException):
    """The time is outside of the buffered range."""


class InvalidArgumentException(TransformException):
    """A frame id is empty or starts with a slash."""


class TimeoutException(TransformException):
    """The transform did not become available in time."""
